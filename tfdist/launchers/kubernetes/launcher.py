# SPDX-License-Identifier: Apache-2.0
"""Starts a script as every task of a job on Kubernetes, which needs no additional software there.

`plan` renders the manifests, `submit` passes them to `kubectl`; a dry run prints them. In each pod,
`tfdist.launchers.kubernetes.task` determines the pod's task.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import re
import secrets
import shlex
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import yaml
from absl import flags

from tfdist import _log
from tfdist.cluster import JOB_SECRET_VARIABLE
from tfdist.launchers import command_line, requests, shape
from tfdist.launchers.kubernetes import task as kubernetes_task
from tfdist.launchers.requests import (
    HOPELESS_EXIT_CODES,
    TRY_AGAIN_EXIT_CODE,
    LaunchError,
    ToolError,
    read_file,
    setting,
)
from tfdist.launchers.shape import Job, Shape

_USAGE = """\
usage: tfdist launch kubernetes --image=IMAGE [FLAGS] SCRIPT|-m MODULE [ARGUMENTS]

Creates Indexed Jobs that run SCRIPT, a path in IMAGE, as every task of a cluster. Arguments after SCRIPT are passed to
it. tfdist has to be installed in the image.

  tfdist launch kubernetes --image=me/train:1 --num_workers=4 --gpus_per_worker=1 /app/train.py --epochs=5
"""
_NAME = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?", re.ASCII)
# Of memory, plain numbers and "m" are bytes and thousandths of them: what is meant is Mi or Gi.
_QUANTITIES = {
    "cpu": (re.compile(r"[0-9]+(\.[0-9]+)?m?", re.ASCII), "4 or 500m"),
    "memory": (re.compile(r"[0-9]{8,}|[0-9]+(\.[0-9]+)?[MGTPE]i?", re.ASCII), "16Gi or 512Mi"),
}
_IMAGE = re.compile(r"[A-Za-z0-9][\w./:@-]*", re.ASCII)
_LABEL = 63


@dataclasses.dataclass(frozen=True)
class KubernetesRequest:
    """The Kubernetes objects to create, and the description of their job. `str` returns the manifests."""

    objects: tuple[Mapping[str, Any], ...]
    pods: Pods

    def __str__(self) -> str:
        return yaml_documents(self.objects)

    @property
    def namespace(self) -> tuple[str, ...]:
        """The flag of kubectl for the namespace, if one is given."""
        return (f"--namespace={self.pods.namespace}",) if self.pods.namespace else ()

    @property
    def selector(self) -> tuple[str, ...]:
        """The flags of kubectl that select the job's objects."""
        return (f"--selector=app.kubernetes.io/instance={self.pods.name}", *self.namespace)

    @property
    def removal(self) -> str:
        """The command that removes the job."""
        kinds = dict.fromkeys(str(each["kind"]).lower() for each in self.objects)
        return f"kubectl delete {','.join(kinds)} {' '.join(self.selector)}"


def plan(pods: Pods, patches: Sequence[Any] = ()) -> KubernetesRequest:
    """Renders the objects that `submit` creates, with a new secret.

    Args:
      pods: the job.
      patches: objects in part, each merged into those of its `kind`, and of its name if it has one.

    Raises:
      LaunchError: a value is out of range, or is an invalid name of an object or host; or a patch is for no object.
    """
    check_pods(pods)
    if pods.form == "jobset":
        jobs = [network_policy(pods), jobset(pods)]  # Its controller creates the Service.
    else:
        jobs = [indexed_job(pods, role) for role in pods.roles]
        jobs = [service(pods), network_policy(pods), *jobs]
    objects = [secret(pods, secrets.token_hex(32)), *jobs]
    for patch in patches:
        objects = _patched(objects, patch)
    return KubernetesRequest(tuple(objects), pods)


def read_patches(path: str) -> list[Any]:
    """Reads the YAML documents of a file.

    Raises:
      LaunchError: the file can't be read, or is no YAML.
    """
    try:
        found = [each for each in yaml.safe_load_all(read_file("--patch", path)) if each is not None]
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or "other characters"
        where = f"line {mark.line + 1}: {problem}" if mark else problem
        raise LaunchError(f"--patch is no YAML ({where}); mend it. Received: {path!r}") from None
    if wrong := [each for each in found or [None] if not isinstance(each, dict) or "kind" not in each]:
        raise LaunchError(
            f"--patch needs an object with a kind, such as kind: Job, and what to change in it. Received: {path!r} "
            f"with {'nothing' if wrong[0] is None else json.dumps(wrong[0], default=str)[:60]}"
        )
    return found


def _patched(objects: Sequence[dict[str, Any]], patch: Any) -> list[dict[str, Any]]:
    known = ", ".join(f"{each['kind']} {each['metadata']['name']}" for each in objects)
    kind, meta = patch["kind"], patch.get("metadata")
    name = meta.get("name") if isinstance(meta, dict) else None
    is_meant = [each["kind"] == kind and name in (None, each["metadata"]["name"]) for each in objects]
    if not any(is_meant):
        raise LaunchError(
            f"--patch is for none of the objects; give kind, and name in metadata, of one of {known}. Received: "
            f"{' '.join(map(str, filter(None, (kind, name))))}"
        )
    return [_merged(each, patch, str(kind)) if meant else each for each, meant in zip(objects, is_meant, strict=True)]


def _merged(value: Any, patch: Any, where: str) -> Any:
    """Merges as Kubernetes' strategic merge does: items of lists by their name, null removes."""
    if isinstance(value, dict) and isinstance(patch, dict):
        found = {**value, **{key: _merged(value.get(key), each, f"{where}.{key}") for key, each in patch.items()}}
        return {key: each for key, each in found.items() if each is not None}
    if isinstance(value, list) and isinstance(patch, list) and all("name" in each for each in (*value, *patch)):
        found = {each["name"]: each for each in value}
        found |= {each["name"]: _merged(found.get(each["name"]), each, where) for each in patch}
        return list(found.values())
    if isinstance(value, (dict, list)) and patch is not None and type(patch) is not type(value):
        form = "fields" if isinstance(value, dict) else "a list"
        raise LaunchError(f"--patch: {where} has {form}; write these, or null to remove it. Received: {patch!r}")
    return patch


def check_pods(pods: Pods) -> None:
    """Checks the rules that Kubernetes' schemas don't check.

    Raises:
      LaunchError: a value is out of range, or is an invalid name of an object or host.
    """
    if not _IMAGE.fullmatch(pods.image):
        raise LaunchError(
            "--image is no name of an image; write the one in which the script and tfdist are, such as me/train:1. "
            f"Received: {pods.image or 'nothing'}"
        )
    for flag, name in (("name", pods.name), ("namespace", pods.namespace), *(("claim", c) for c in pods.claims)):
        if name and not _NAME.fullmatch(name):
            form = "begin with a-z, go on with a-z, 0-9 and dashes, and end without a dash"
            raise LaunchError(f"--{flag} is no name for Kubernetes; {form}. Received: {name!r}")
        if len(name) > _LABEL:
            raise LaunchError(f"--{flag} is longer than {_LABEL} characters; use a shorter one. Received: {name!r}")
    longest = max((f"{pods.name}-{task.type}-0-{task.index}" for task in pods.shape.tasks), key=len)
    if not pods.name or len(longest) > _LABEL:
        raise LaunchError(
            f"--name makes hosts with names of {len(longest)} characters, such as {longest}, and {_LABEL} are allowed; "
            f"use 1 to {_LABEL - len(longest) + len(pods.name)} characters. Received: {pods.name!r}"
        )
    for claim, directory in pods.claims.items():
        if not directory.startswith("/"):
            raise LaunchError(f"--claim is mounted at an absolute path; write --claim={claim}=/{directory}")
    for flag, (pattern, form) in _QUANTITIES.items():
        if (value := getattr(pods, flag)) and not pattern.fullmatch(value):
            raise LaunchError(f"--{flag} is no quantity of it; write {form}. Received: {value!r}")
    for text in (*pods.command, *pods.env.values()):
        if "\0" in text or (not text.isascii() and text.encode("utf-8", "replace").decode() != text):
            raise LaunchError(f"an argument is not UTF-8 text, which is all Kubernetes takes. Received: {text!r}")


def submit(request: KubernetesRequest) -> int:
    """Creates all objects or none, and checks that their pods can be created.

    Returns:
      0 if the objects were created; 1 if they were, but the cluster refuses to create their pods.

    Raises:
      LaunchError: kubectl is not installed, or the cluster refuses an object, for example because a job of this name
        exists. No object is created then.
    """
    kubectl = requests.find_tool("kubectl", "install it, or look at the manifests with --dry_run")
    create_objects(kubectl, request)
    chosen, num_pods = " ".join(request.selector), len(request.pods.shape.tasks)
    logs = f"kubectl logs --follow --prefix --max-log-requests={num_pods} {chosen}"
    _log.say(
        f"kubectl get pods {chosen}   shows the job",
        f"{logs}   follows what the tasks print",
        f"{request.removal}   ends the job and removes all of it",
    )
    return look_for_pods(kubectl, request) if request.pods.start_timeout_secs else 0


def define_flags(values: flags.FlagValues) -> None:
    """Defines this platform's flags."""
    shape.define_flags(values, Shape, Pods)
    table = {
        "node_selector": ([], "LABEL=VALUE of the nodes for workers; may be repeated"),
        "claim": ([], "NAME=DIRECTORY: where a volume claim is mounted; may be repeated"),
        "patch": ([], "file with YAML that is merged into objects of its kind; may be repeated"),
    }
    command_line.define(values, table)


def _pairs(flag: str, settings: Sequence[str], form: str) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for given in settings:
        key, _, value = given.partition("=")
        if not key or not value or "," in value:
            raise LaunchError(f"--{flag} is one pair; write {form}, and the flag again for more. Received: {given!r}")
        if key in pairs:
            raise LaunchError(f"--{flag} names {key} twice; leave one out. Received: {pairs[key]!r} and {value!r}")
        pairs[key] = value
    return pairs


def _launch(values: flags.FlagValues, command: Sequence[str]) -> int:
    patches = [patch for path in values.patch for patch in read_patches(path)]
    labels = _pairs("node_selector", values.node_selector, "LABEL=VALUE")
    claims = _pairs("claim", values.claim, "NAME=DIRECTORY")
    pods = shape.job_from_flags(Pods, values, command, node_selector=labels, claims=claims)
    request = plan(pods, patches)
    return command_line.submit_or_show(values, request, lambda: submit(request))


main = functools.partial(command_line.run_command, _USAGE, define_flags, run=_launch)


# Creates a job's objects through kubectl, all of them or none, and checks that their pods are created.

_POLL_SECS = 0.5
# A controller that fails once, for example because a service account doesn't exist yet, retries within seconds.
_SETTLED_SECS = 5.0
_TAKEN = re.compile(r'([a-z0-9.-]+) "([^"]+)" already exists')
_REFUSED = ("FailedCreate", "FailedCreatePod")


def create_objects(kubectl: str, request: KubernetesRequest) -> None:
    """Creates all objects of a job, after a rehearsal, so that a refusal leaves nothing behind.

    Raises:
      ToolError: the cluster refuses an object, for example because its name is taken.
    """
    create, text = [kubectl, "create", "--output=name", "--filename=-"], str(request)
    try:
        requests.run_tool([*create, "--dry-run=server"], text)
    except ToolError as error:
        # Some clusters have webhooks that refuse a dry run.
        if "dry run" not in error.errors.lower():
            raise ToolError(f"{_problem(error, request)}; nothing was created") from None
    try:
        created = requests.run_tool(create, text, show_warnings=True)
    except ToolError as error:
        left = shlex.join([kubectl, "delete", *request.namespace, *error.output.split()])
        left = f"remove what was created: {left}" if error.output else "kubectl reports no object as created"
        if error.is_late:
            left = f"this removes what it may have created: {request.removal}"
        raise ToolError(f"{_problem(error, request)}; {left}") from None
    sys.stdout.write("".join(f"{name} created\n" for name in created.split()))


def _problem(error: ToolError, request: KubernetesRequest) -> str:
    """Returns the reason for which kubectl failed, on one line."""
    if taken := list(map(" ".join, _TAKEN.findall(error.errors))):
        return (
            f"--name={request.pods.name} is taken; use another, or remove the old job first ({request.removal}). "
            f"There already: {', '.join(dict.fromkeys(taken))}"
        )
    return str(error)


def look_for_pods(kubectl: str, request: KubernetesRequest) -> int:
    """Waits until all pods are created; they need not run yet.

    Returns:
      1 if the cluster refuses to create pods; 0 if all are created, or no refusal is known.
    """
    start, asked, timeout_secs = time.monotonic(), len(request.pods.shape.tasks), request.pods.start_timeout_secs
    refused_secs: float | None = None
    while True:
        waited_secs = time.monotonic() - start
        found = _get(kubectl, ["pods,jobs", *request.selector])
        if found is None:
            _log.say(f"can't look whether pods are created; try kubectl get pods {' '.join(request.selector)}")
            return 0
        num_pods = sum(each["kind"] == "Pod" for each in found)
        if num_pods >= asked:
            return 0
        if any(each["kind"] == "Job" and each["spec"].get("suspend") for each in found):
            _log.say("the job is suspended; its pods are created once it is admitted")
            return 0
        reason = _refusal(kubectl, request, found)
        if reason and refused_secs is None:
            refused_secs = waited_secs
        settled = refused_secs is not None and waited_secs - refused_secs >= min(_SETTLED_SECS, timeout_secs / 2)
        if reason and (settled or waited_secs >= timeout_secs):
            _log.say(f"{num_pods} of {asked} pods are created, for the cluster refuses the others: {reason}")
            _log.say("the job goes on trying; change the quota or policy, or remove the job")
            return 1
        if waited_secs >= timeout_secs:
            _log.say(f"{num_pods} of {asked} pods are created after {timeout_secs:g} s; see kubectl get events")
            return 0
        time.sleep(_POLL_SECS)


def _refusal(kubectl: str, request: KubernetesRequest, found: Sequence[Mapping[str, Any]]) -> str | None:
    """Returns the newest reason for which a controller could not create a pod of this job, or None."""
    events = _get(kubectl, ["events", "--field-selector=type=Warning", *request.namespace]) or []
    # Filtered by uid, because events of an earlier job of the same name stay for an hour.
    uids = {each["metadata"]["uid"] for each in found}
    if request.pods.form == "jobset":
        uids |= {each["metadata"]["uid"] for each in _get(kubectl, ["jobset", *request.selector]) or []}
    reasons = [
        str(event.get("message", ""))
        for event in events
        if event.get("reason") in _REFUSED and event.get("involvedObject", {}).get("uid") in uids
    ]
    return " ".join(reasons[-1].split()) if reasons else None


def _get(kubectl: str, arguments: Sequence[str]) -> list[dict[str, Any]] | None:
    try:
        return list(json.loads(requests.run_tool([kubectl, "get", *arguments, "--output=json"]))["items"])
    except (ValueError, KeyError, TypeError):  # A ToolError is a ValueError.
        return None


# Writes plain data as readable YAML, in which every YAML parser reads text as text.
#
# PyYAML itself writes text such as 1e3 without quotes, which the YAML library of Kubernetes reads as a number.

# Text that every YAML parser reads as text. Other text, such as "on", "1e3" and "~", is quoted.
_PLAIN = re.compile(r"[A-Za-z_./][A-Za-z0-9_./=-]*(?: [A-Za-z0-9_./=-]+)*", re.ASCII)
_WORDS = {"y", "n", "yes", "no", "on", "off", "true", "false", "null", "nan", ".nan", ".inf"}


def yaml_documents(objects: Iterable[Mapping[str, Any]]) -> str:
    """Returns YAML documents in one text, ended by a newline.

    Raises:
      yaml.representer.RepresenterError: a value is no dict, list, text, number or boolean.
    """
    return yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=float("inf"))


class _Dumper(yaml.SafeDumper):
    """YAML writer that quotes ambiguous text, and writes no anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        """Writes a value that occurs twice two times instead of as an anchor, which is easier to read."""
        del data
        return True


def _text(dumper: _Dumper, value: str) -> yaml.Node:
    is_plain = _PLAIN.fullmatch(value) and value.lower() not in _WORDS and not re.fullmatch(r"[.0-9_-]+", value)
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=None if is_plain else '"')


_Dumper.add_representer(str, _text)


# Kubernetes objects of a job, as plain data.
#
# One Indexed Job for each kind of task, so that parameter servers need not have the workers' GPUs. A headless Service
# gives each pod a name; a NetworkPolicy admits only the job's own pods.


# For each form of a job the variable that passes the count of replacements to the wrapper, and the annotation in which
# the controller counts them; older versions of Kubernetes leave it empty.
_COUNTS = {
    "job": (kubernetes_task.IGNORED_VARIABLE, "batch.kubernetes.io/job-index-ignored-failure-count"),
    "jobset": (kubernetes_task.RESTARTS_VARIABLE, "jobset.sigs.k8s.io/restart-attempt"),
}
# A finished job stays for a day, with the output of its pods.
_KEPT_SECS = 86_400


@dataclasses.dataclass(frozen=True)
class Pods(Job):
    """A job on Kubernetes: its tasks, and the common properties of its pods.

    Args:
      node_selector: labels of the nodes for pods that compute.
      claims: mount directory by the name of the volume claim.
    """

    node_selector: Mapping[str, str] = dataclasses.field(default_factory=dict)
    claims: Mapping[str, str] = dataclasses.field(default_factory=dict)
    image: str = setting("", "image of the container, with the script and tfdist in it")
    name: str = setting("tfdist", "name of the job")
    namespace: str = setting("", "namespace; by default the current one of kubectl")
    form: str = setting(
        "job", "job: Indexed Jobs; jobset: a JobSet, which restarts all tasks when one fails", ("job", "jobset")
    )
    python: str = setting("python3", "interpreter in the image")
    working_dir: str = setting("", "where the script runs; the image's own by default")
    cpu: str = setting("", "cores for each pod, such as 4 or 500m")
    memory: str = setting("", "memory for each pod, such as 16Gi")
    gpus_per_worker: int = setting(0, "GPUs for each worker")
    gpu_resource: str = setting("nvidia.com/gpu", "the cluster's name for a GPU")
    port: int = setting(2222, "port of every task", least=1, most=65534)
    max_restarts: int = setting(3, "failures that each task may have; preemptions don't count")
    max_preemptions: int = setting(100, "preemptions that the job may have")
    start_timeout_secs: float = setting(20.0, "seconds to look whether the job's pods can be created; 0 for not at all")
    grace_period_secs: int = setting(120, "seconds that a pod has to save its work after SIGTERM")

    @property
    def roles(self) -> dict[str, int]:
        """Number of tasks of each kind."""
        return collections.Counter(task.type for task in self.shape.tasks)

    @property
    def labels(self) -> dict[str, str]:
        """Labels that select the objects of this job."""
        return {"app.kubernetes.io/managed-by": "tfdist", "app.kubernetes.io/instance": self.name}


def literal(text: str) -> str:
    """Escapes text, in which Kubernetes would otherwise replace $(NAME) by the value of the variable."""
    return text.replace("$", "$$")


def _object(pods: Pods, version: str, kind: str, name: str = "", **content: Any) -> dict[str, Any]:
    """Returns an object of a job, with the job's name by default."""
    namespace = {"namespace": pods.namespace} if pods.namespace else {}
    metadata = {"name": name or pods.name, **namespace, "labels": pods.labels}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **content}


def secret(pods: Pods, value: str) -> dict[str, Any]:
    """Returns the Secret with the job's secret."""
    return _object(pods, "v1", "Secret", type="Opaque", stringData={"job-secret": value})


def service(pods: Pods) -> dict[str, Any]:
    """Returns the headless Service that names the pods, also before they are ready: they wait for each other."""
    ports = [{"name": "tasks", "port": pods.port}]
    spec = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": pods.labels, "ports": ports}
    return _object(pods, "v1", "Service", spec=spec)


def network_policy(pods: Pods) -> dict[str, Any]:
    """Returns the NetworkPolicy that admits only the job's own pods: TensorFlow's servers authenticate no peer."""
    own = {"matchLabels": pods.labels}
    spec = {"podSelector": own, "policyTypes": ["Ingress"], "ingress": [{"from": [{"podSelector": own}]}]}
    return _object(pods, "networking.k8s.io/v1", "NetworkPolicy", spec=spec)


def indexed_job(pods: Pods, role: str) -> dict[str, Any]:
    """Returns the Job for the tasks of one kind; a preempted pod is replaced without counting a failure."""
    hopeless = [*HOPELESS_EXIT_CODES, kubernetes_task.GIVEN_UP_EXIT_CODE]
    rules = [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "Ignore", "onExitCodes": _codes([TRY_AGAIN_EXIT_CODE])},
        {"action": "FailJob", "onExitCodes": _codes(hopeless)},
    ]
    host = f"{pods.name}-{{type}}-{{index}}.{pods.name}"
    # When one task of an all-reduce job fails, all do. Counted by index, that is one failure of each, and after it
    # Kubernetes waits 10 s; counted together, four workers would wait 80 s. The first index with too many ends the Job.
    limits = {"backoffLimitPerIndex": pods.max_restarts, "maxFailedIndexes": 0}
    limits |= {"ttlSecondsAfterFinished": _KEPT_SECS}
    spec = _job_spec(pods, role, host, limits, rules)
    return _object(pods, "batch/v1", "Job", f"{pods.name}-{role}", spec=spec)


def jobset(pods: Pods) -> dict[str, Any]:
    """Returns a JobSet: when one task fails, all tasks start again together."""
    # A Job that fails by its pod failure policy was preempted, which the JobSet must not count.
    rules = [
        {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "FailJob", "onExitCodes": _codes([TRY_AGAIN_EXIT_CODE])},
    ]
    host = f"{pods.name}-{{type}}-0-{{index}}.{pods.name}"
    jobs = []
    for role in pods.roles:
        spec = _job_spec(pods, role, host, {"backoffLimit": 0}, rules)
        jobs.append({"name": role, "replicas": 1, "template": {"metadata": {"labels": pods.labels}, "spec": spec}})
    deciding = list(dict.fromkeys(task.type for task in pods.shape.deciding))
    uncounted = {
        "name": "preempted",
        "action": "RestartJobSetAndIgnoreMaxRestarts",
        "onJobFailureReasons": ["PodFailurePolicy"],
    }
    spec = {
        "network": {"enableDNSHostnames": True, "subdomain": pods.name, "publishNotReadyAddresses": True},
        "successPolicy": {"operator": "All", "targetReplicatedJobs": deciding},
        "failurePolicy": {"maxRestarts": pods.max_restarts, "rules": [uncounted]},
        "replicatedJobs": jobs,
        "ttlSecondsAfterFinished": _KEPT_SECS,
    }
    return _object(pods, "jobset.x-k8s.io/v1alpha2", "JobSet", spec=spec)


def _codes(values: list[int]) -> dict[str, Any]:
    # The API server accepts only sorted exit codes.
    return {"containerName": "task", "operator": "In", "values": sorted(values)}


def _job_spec(
    pods: Pods, role: str, host_format: str, limits: Mapping[str, int], rules: list[dict[str, Any]]
) -> dict[str, Any]:
    # Determines the pod's task, and runs the script.
    wrapper = (pods.python, "-P", "-m", "tfdist.launchers.kubernetes.task", *pods.shape.arguments(), f"--role={role}")
    numbers = {"port": pods.port, "max_restarts": pods.max_restarts, "max_preemptions": pods.max_preemptions}
    shown = [f"--{name}={value}" for name, value in numbers.items()]
    command = (*wrapper, f"--form={pods.form}", f"--host_format={host_format}", *shown, "--", *pods.command)
    return {
        "completions": pods.roles[role],
        "parallelism": pods.roles[role],
        "completionMode": "Indexed",
        **limits,
        "podFailurePolicy": {"rules": rules},
        "template": _template(pods, role, command),
    }


def _template(pods: Pods, role: str, command: tuple[str, ...]) -> dict[str, Any]:
    computes = any(task.type == role for task in pods.shape.computing)
    accelerators = {pods.gpu_resource: pods.gpus_per_worker} if computes and pods.gpus_per_worker else {}
    asked = {name: value for name, value in (("cpu", pods.cpu), ("memory", pods.memory)) if value}
    volumes = [{"name": f"claim-{i}", "persistentVolumeClaim": {"claimName": c}} for i, c in enumerate(pods.claims)]
    mounts = [{"name": f"claim-{i}", "mountPath": path} for i, path in enumerate(pods.claims.values())]
    if accelerators:
        # NCCL needs more than the usual 64 MB of /dev/shm.
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory"}})
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})
    container: dict[str, Any] = {
        "name": "task",
        "image": pods.image,
        "command": [literal(word) for word in command],
        "env": _environment(pods, computes),
        "ports": [{"name": "tasks", "containerPort": pods.port}],
        # As PodSecurity's level "restricted" asks, but for the user, which is the image's.
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    resources = {"requests": {**asked, **accelerators}, "limits": accelerators}
    optional = {
        "workingDir": pods.working_dir,
        "resources": {key: value for key, value in resources.items() if value},
        "volumeMounts": mounts,
    }
    container |= {key: value for key, value in optional.items() if value}
    spec: dict[str, Any] = {"subdomain": pods.name, "restartPolicy": "Never"}
    spec |= {"terminationGracePeriodSeconds": pods.grace_period_secs, "enableServiceLinks": False}
    spec |= {"automountServiceAccountToken": False, "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}}}
    if computes and pods.node_selector:
        spec["nodeSelector"] = dict(pods.node_selector)
    spec["containers"] = [container]
    if volumes:
        spec["volumes"] = volumes
    return {"metadata": {"labels": {**pods.labels, "app.kubernetes.io/component": role}}, "spec": spec}


def _environment(pods: Pods, computes: bool) -> list[dict[str, Any]]:
    env: list[dict[str, Any]] = [{"name": name, "value": literal(value)} for name, value in pods.env.items()]
    if pods.gpus_per_worker and not computes:
        # Some images and runtimes show all GPUs of the node to containers that requested none.
        env.append({"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"})
    reference = {"name": pods.name, "key": "job-secret", "optional": True}
    env.append({"name": JOB_SECRET_VARIABLE, "valueFrom": {"secretKeyRef": reference}})
    name, annotation = _COUNTS[pods.form]
    field = {"fieldPath": f"metadata.annotations['{annotation}']"}
    env.append({"name": name, "valueFrom": {"fieldRef": field}})
    return env
