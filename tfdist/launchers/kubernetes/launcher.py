# SPDX-License-Identifier: Apache-2.0
"""Starts a script as every task of a job on Kubernetes, which needs no additional software there.

`plan` renders the manifests, `submit` passes them to `kubectl`; a dry run prints them. In each pod,
`tfdist.launchers.kubernetes.task` determines the pod's task.
"""

from __future__ import annotations

import dataclasses
import json
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import yaml
from absl import flags

from tfdist import _log
from tfdist.launchers import command_line, environment, shape, tools
from tfdist.launchers.kubernetes import manifests
from tfdist.launchers.kubernetes.manifests import Pods
from tfdist.launchers.requests import LaunchError, ToolError, read_file
from tfdist.launchers.shape import Shape

_USAGE = """\
usage: tfdist launch kubernetes --image=IMAGE [FLAGS] SCRIPT [ARGUMENTS]
       tfdist launch kubernetes --image=IMAGE [FLAGS] -m MODULE [ARGUMENTS]

Creates Indexed Jobs that run SCRIPT, a path in IMAGE, as every task of a cluster. Arguments after SCRIPT are passed to
it. tfdist has to be installed in the image.

  tfdist launch kubernetes --image=me/train:1 --num_workers=4 --gpus_per_worker=1 /app/train.py --epochs=5
"""
_NAME = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?", re.ASCII)
_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|[kMGTPE]i?)?", re.ASCII)
_IMAGE = re.compile(r"[a-z0-9][\w./:@-]*", re.ASCII)
_LABEL = 63


@dataclasses.dataclass(frozen=True)
class KubernetesRequest:
    """The Kubernetes objects to create, and the description of their job."""

    objects: tuple[Mapping[str, Any], ...]
    pods: Pods

    def __str__(self) -> str:
        return yaml_documents(self.objects)


def plan(pods: Pods, form: str = "job", patches: Sequence[Any] = ()) -> KubernetesRequest:
    """Renders the objects that `submit` creates, with a new secret.

    Args:
      pods: the job.
      form: "job" for Indexed Jobs, "jobset" for a JobSet.
      patches: objects in part, each merged into those of its `kind`, and of its name if it has one.

    Raises:
      LaunchError: a value is out of range, or is an invalid name of an object or host; or a patch is for no object.
    """
    check_pods(pods)
    if form == "jobset":
        jobs = [manifests.network_policy(pods), manifests.jobset(pods)]  # Its controller creates the Service.
    else:
        jobs = [manifests.indexed_job(pods, role) for role in pods.roles]
        jobs = [manifests.service(pods), manifests.network_policy(pods), *jobs]
    objects = [manifests.secret(pods, secrets.token_hex(32)), *jobs]
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
        mark, problem = (
            getattr(error, "problem_mark", None),
            getattr(error, "problem", None) or "it has other characters",
        )
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
        return list(
            {**found, **{each["name"]: _merged(found.get(each["name"]), each, where) for each in patch}}.values()
        )
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
            raise LaunchError(f"--{flag} is no name for Kubernetes; use a-z, 0-9 and dashes. Received: {name!r}")
        if len(name) > _LABEL:
            raise LaunchError(f"--{flag} is longer than {_LABEL} characters; use a shorter one. Received: {name!r}")
    longest = max((f"{pods.name}-{task.type}-0-{task.index}" for task in pods.shape.tasks), key=len)
    if not pods.name or len(longest) > _LABEL:
        raise LaunchError(
            f"--name makes hosts with names of {len(longest)} characters, such as {longest}, and {_LABEL} are allowed; "
            f"use 1 to {_LABEL - len(longest) + len(pods.name)} characters. Received: {pods.name!r}"
        )
    for flag in ("cpu", "memory"):
        value = getattr(pods, flag)
        if value and not _QUANTITY.fullmatch(value):
            raise LaunchError(f"--{flag} is no quantity; write 4, 500m or 16Gi. Received: {value!r}")
    shape.check_count("max_restarts", pods.max_restarts)
    shape.check_count("max_preemptions", pods.max_preemptions)
    shape.check_count("grace_period_secs", pods.grace_secs)
    for count in pods.accelerators.values():
        shape.check_count("gpus_per_worker", count)
    if not 0 < pods.port < 65535:
        raise LaunchError(f"--port is not a port with one after it; use 1 to 65534. Received: {pods.port}")
    for text in (*pods.command, *pods.env.values()):
        if "\0" in text or (not text.isascii() and text.encode("utf-8", "replace").decode() != text):
            raise LaunchError(f"an argument is not UTF-8 text, which is all Kubernetes takes. Received: {text!r}")


def submit(request: KubernetesRequest, start_timeout_secs: float = 20.0) -> int:
    """Creates all objects or none, and checks that their pods can be created.

    Args:
      request: the objects to create.
      start_timeout_secs: how long to wait for the pods; 0 for no wait.

    Returns:
      0 if the objects were created; 1 if they were, but the cluster refuses to create their pods.

    Raises:
      LaunchError: kubectl is not installed, or the cluster refuses an object, for example because a job of this name
        exists. No object is created then.
    """
    kubectl = tools.find_tool("kubectl", "install it, or look at the manifests with --dry_run")
    pods = request.pods
    where = (f"--namespace={pods.namespace}",) if pods.namespace else ()
    chosen = (f"--selector=app.kubernetes.io/instance={pods.name}", *where)
    kinds = tuple(dict.fromkeys(str(each["kind"]).lower() for each in request.objects))
    job = KubernetesJob(pods.name, str(request), kinds, chosen, len(pods.shape.tasks))
    create_objects(kubectl, job)
    logs = f"kubectl logs --follow --prefix --max-log-requests={len(pods.shape.tasks)} {' '.join(chosen)}"
    _log.say(
        f"kubectl get pods {' '.join(chosen)}   shows the job",
        f"{logs}   follows what the tasks print",
        f"{job.removal}   ends the job and removes all of it",
    )
    return look_for_pods(kubectl, job, start_timeout_secs) if start_timeout_secs else 0


def define_flags(values: flags.FlagValues) -> None:
    """Defines this platform's flags."""
    shape.define_flags(values)
    table = {
        "image": ("", "image of the container, with the script and tfdist in it"),
        "name": ("tfdist", "name of the job"),
        "namespace": ("", "namespace; by default the current one of kubectl"),
        "python": ("python3", "interpreter in the image"),
        "working_dir": ("", "where the script runs; the image's own by default"),
        "cpu": ("", "cores for each pod, such as 4 or 500m"),
        "memory": ("", "memory for each pod, such as 16Gi"),
        "gpus_per_worker": (0, "GPUs for each worker"),
        "gpu_resource": ("nvidia.com/gpu", "the cluster's name for a GPU"),
        "port": (2222, "port of every task"),
        "max_restarts": (3, "failures that each task may have; preemptions don't count"),
        "max_preemptions": (100, "preemptions that the job may have"),
        "grace_period_secs": (120, "seconds that a pod has to save its work after SIGTERM"),
        "start_timeout_secs": (20.0, "seconds to look whether the job's pods can be created; 0 for not at all"),
        "env": ([], "NAME=VALUE for all tasks; may be repeated"),
        "node_selector": ([], "LABEL=VALUE of the nodes for workers; may be repeated"),
        "claim": ([], "NAME=DIRECTORY: where a volume claim is mounted; may be repeated"),
        "patch": ([], "file with YAML that is merged into objects of its kind; may be repeated"),
        "dry_run": (False, "print the manifests, create nothing"),
    }
    command_line.define(values, table)
    forms = "job: Indexed Jobs; jobset: a JobSet, which restarts all tasks when one fails"
    flags.DEFINE_enum("form", "job", ["job", "jobset"], forms, flag_values=values)
    environment.define_flags(values)


def pods_from_flags(values: flags.FlagValues, command: Sequence[str]) -> Pods:
    """Returns the job that the command line describes.

    Raises:
      LaunchError: a flag is invalid.
    """
    shape.check_duration("start_timeout_secs", values.start_timeout_secs)
    same = ("image", "name", "namespace", "python", "working_dir", "cpu", "memory", "port", "max_restarts")
    return Pods(
        shape=Shape.from_flags(values),
        command=tuple(command),
        env=environment.from_flags(values),
        node_selector=_pairs("node_selector", values.node_selector, "LABEL=VALUE"),
        claims=_pairs("claim", values.claim, "NAME=DIRECTORY"),
        grace_secs=values.grace_period_secs,
        accelerators={values.gpu_resource: values.gpus_per_worker} if values.gpus_per_worker else {},
        max_preemptions=values.max_preemptions,
        **{name: getattr(values, name) for name in same},
    )


def _pairs(flag: str, settings: Sequence[str], form: str) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for setting in settings:
        key, _, value = setting.partition("=")
        if not key or not value:
            raise LaunchError(f"--{flag} is no pair; write {form}. Received: {setting!r}")
        pairs[key] = value
    return pairs


def main(arguments: Sequence[str]) -> int:
    """Runs `tfdist launch kubernetes`. See `command_line.run_command`."""
    return command_line.run_command(_USAGE, define_flags, arguments, _launch)


def _launch(values: flags.FlagValues, command: Sequence[str]) -> int:
    patches = [patch for path in values.patch for patch in read_patches(path)]
    request = plan(pods_from_flags(values, command), values.form, patches)
    return command_line.submit_or_show(values, request, lambda: submit(request, values.start_timeout_secs))


# Creates a job's objects through kubectl, all of them or none, and checks that their pods are created.


_TIMEOUT_SECS = 120.0
_POLL_SECS = 0.5
# A controller that fails once, for example because a service account doesn't exist yet, retries within seconds.
_SETTLED_SECS = 5.0
_TAKEN = re.compile(r'([a-z0-9.-]+) "([^"]+)" already exists')
_WARNING = "Warning:"
_REFUSED = ("FailedCreate", "FailedCreatePod")


@dataclasses.dataclass(frozen=True)
class KubernetesJob:
    """The objects of a job, and the flags that select them.

    Args:
      name: name of the job.
      text: the manifests.
      kinds: kinds of the objects, as kubectl writes them.
      selector: the flags of kubectl that select the job's objects.
      num_pods: number of the job's pods.
    """

    name: str
    text: str
    kinds: tuple[str, ...]
    selector: tuple[str, ...]
    num_pods: int

    @property
    def removal(self) -> str:
        """The command that removes the job."""
        return f"kubectl delete {','.join(self.kinds)} {' '.join(self.selector)}"


@dataclasses.dataclass(frozen=True)
class _Answer:
    code: int | None  # None: it took too long.
    out: str
    err: str


def create_objects(kubectl: str, job: KubernetesJob) -> None:
    """Creates all objects of a job, after a rehearsal, so that a refusal leaves nothing behind.

    Raises:
      ToolError: the cluster refuses an object, for example because its name is taken.
    """
    shown: set[str] = set()
    rehearsal = _run([kubectl, "create", "--dry-run=server", "--output=name", "--filename=-"], job.text)
    _show_warnings(rehearsal, shown)
    # Some clusters have webhooks that refuse a dry run.
    if rehearsal.code != 0 and "dry run" not in rehearsal.err.lower():
        raise ToolError(f"{_problem(rehearsal, job)}; nothing was created")
    answer = _run([kubectl, "create", "--output=name", "--filename=-"], job.text)
    _show_warnings(answer, shown)
    created = [line.strip() for line in answer.out.splitlines() if "/" in line]
    if answer.code == 0:
        sys.stdout.write("".join(f"{name} created\n" for name in created))
        return
    if answer.code is None:
        raise ToolError(f"{_problem(answer, job)}; some may have been created, remove them: {job.removal}")
    where = [flag for flag in job.selector if flag.startswith("--namespace")]
    left = f"remove what was created: {' '.join([kubectl, 'delete', *where, *created])}"
    raise ToolError(f"{_problem(answer, job)}; {left if created else 'nothing was created'}")


def look_for_pods(kubectl: str, job: KubernetesJob, timeout_secs: float) -> int:
    """Waits until all pods are created; they need not run yet.

    Returns:
      1 if the cluster refuses to create pods; 0 if all are created, or no refusal is known.
    """
    start = time.monotonic()
    refused_secs: float | None = None
    while True:
        waited_secs = time.monotonic() - start
        found = _get(kubectl, ["pods,jobs", *job.selector])
        if found is None:
            _log.say(f"can't look whether pods are created; try kubectl get pods {' '.join(job.selector)}")
            return 0
        num_pods = sum(each["kind"] == "Pod" for each in found)
        if num_pods >= job.num_pods:
            return 0
        if any(each["kind"] == "Job" and each["spec"].get("suspend") for each in found):
            _log.say("the job is suspended; its pods are created once it is admitted")
            return 0
        reason = _refusal(kubectl, job, found)
        if reason and refused_secs is None:
            refused_secs = waited_secs
        settled = refused_secs is not None and waited_secs - refused_secs >= min(_SETTLED_SECS, timeout_secs / 2)
        if reason and (settled or waited_secs >= timeout_secs):
            _log.say(f"{num_pods} of {job.num_pods} pods are created, for the cluster refuses the others: {reason}")
            _log.say("the job goes on trying; change the quota or policy, or remove the job")
            return 1
        if waited_secs >= timeout_secs:
            _log.say(f"{num_pods} of {job.num_pods} pods are created after {timeout_secs:g} s; see kubectl get events")
            return 0
        time.sleep(_POLL_SECS)


def _refusal(kubectl: str, job: KubernetesJob, found: Sequence[Mapping[str, Any]]) -> str | None:
    """Returns the newest reason for which a controller could not create a pod of this job, or None."""
    where = [flag for flag in job.selector if flag.startswith("--namespace")]
    events = _get(kubectl, ["events", "--field-selector=type=Warning", *where]) or []
    # Filtered by uid, because events of an earlier job of the same name stay for an hour.
    uids = {each["metadata"]["uid"] for each in found}
    known = [kind for kind in job.kinds if kind == "jobset"]
    for kind in known:
        uids |= {each["metadata"]["uid"] for each in _get(kubectl, [kind, *job.selector]) or []}
    reasons = [
        str(event.get("message", ""))
        for event in events
        if event.get("reason") in _REFUSED and event.get("involvedObject", {}).get("uid") in uids
    ]
    return " ".join(reasons[-1].split()) if reasons else None


def _get(kubectl: str, arguments: Sequence[str]) -> list[dict[str, Any]] | None:
    answer = _run([kubectl, "get", *arguments, "--output=json"])
    if answer.code != 0:
        return None
    try:
        return list(json.loads(answer.out)["items"])
    except (ValueError, KeyError, TypeError):
        return None


def _problem(answer: _Answer, job: KubernetesJob) -> str:
    """Returns the reason for which kubectl failed, on one line."""
    taken = [f"{kind} {name}" for kind, name in _TAKEN.findall(answer.err)]
    if taken:
        return (
            f"--name={job.name} is taken; use another, or remove the old job first ({job.removal}). "
            f"There already: {', '.join(dict.fromkeys(taken))}"
        )
    if answer.code is None:
        return f"kubectl did not answer within {_TIMEOUT_SECS:g} s; try kubectl get pods by hand"
    said = "; ".join(line for line in answer.err.splitlines() if line.strip() and not line.startswith(_WARNING))
    said = said or answer.out.strip()
    return f"kubectl failed with exit code {answer.code}: {said[-500:] or 'it said nothing'}"


def _show_warnings(answer: _Answer, shown: set[str]) -> None:
    """Writes each warning of the API server once."""
    for line in answer.err.splitlines():
        if line.startswith(_WARNING) and line not in shown:
            shown.add(line)
            _log.say(f"kubectl: {line}")


def _run(command: Sequence[str], stdin: str = "") -> _Answer:
    try:
        done = subprocess.run(command, input=stdin.encode("utf-8"), capture_output=True, timeout=_TIMEOUT_SECS)
    except subprocess.TimeoutExpired as late:
        return _Answer(None, *(text.decode("utf-8", "replace") if text else "" for text in (late.stdout, late.stderr)))
    return _Answer(done.returncode, *(text.decode("utf-8", "replace") for text in (done.stdout, done.stderr)))


# Writes plain data as readable YAML, in which every YAML parser reads text as text.
#
# PyYAML itself writes text such as 1e3 without quotes, which the YAML library of Kubernetes reads as a number.


# Text that every YAML parser reads as text. Other text, such as "on", "1e3" and "~", is quoted.
_PLAIN = re.compile(r"[A-Za-z_./][A-Za-z0-9_./=-]*(?: [A-Za-z0-9_./=-]+)*", re.ASCII)
_WORDS = {"y", "n", "yes", "no", "on", "off", "true", "false", "null", "nan", ".nan", ".inf"}


def yaml_documents(objects: Iterable[Mapping[str, Any]]) -> str:
    """Returns several YAML documents in one text."""
    return "---\n".join(yaml_document(value) for value in objects)


def yaml_document(value: Mapping[str, Any]) -> str:
    """Returns one YAML document, ended by a newline.

    Raises:
      yaml.representer.RepresenterError: a value is no dict, list, text, number or boolean.
    """
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=float("inf"))


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
