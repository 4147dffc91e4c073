# SPDX-License-Identifier: Apache-2.0
"""The objects that a job is on Kubernetes, as plain data.

One Indexed Job for each kind of task, so that parameter servers need not have the workers' GPUs; a headless Service
that gives each pod a name; a NetworkPolicy that lets only the job's own pods in.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from tfdist.launchers import kubernetes_task
from tfdist.launchers.pod_rules import GIVEN_UP_EXIT_CODE, HOPELESS_EXIT_CODES
from tfdist.launchers.requests import PREEMPTED_EXIT_CODE
from tfdist.launchers.shape import Shape

# The annotations in which controllers count, by the variable that shows one to the wrapper.
_JOB_COUNTS = {
    kubernetes_task.FAILURES_VARIABLE: "batch.kubernetes.io/job-index-failure-count",
    kubernetes_task.IGNORED_VARIABLE: "batch.kubernetes.io/job-index-ignored-failure-count",
}
_JOBSET_COUNTS = {kubernetes_task.RESTARTS_VARIABLE: "jobset.sigs.k8s.io/restart-attempt"}
_MANAGER = {"app.kubernetes.io/managed-by": "tfdist"}


@dataclasses.dataclass(frozen=True)
class Pods:
    """What all pods of a job have in common.

    Args:
      name: of the job.
      shape: which tasks there are.
      command: the script and its arguments, or "-m", a module and its arguments.
      image: of the container.
      python: the interpreter in the image.
      namespace: "" for the one that kubectl is set to.
      port: on which each task listens.
      cpu, memory: what each pod asks for, as Kubernetes writes it; "" for nothing.
      accelerators: what each pod that computes asks for, such as {"nvidia.com/gpu": 4}.
      node_selector: labels of the nodes on which the pods that compute may run.
      claims: directory by the name of the volume claim that is mounted there.
      env: added to the environment.
      max_restarts: how many failures the job may have, each kind of task with parameter servers.
      max_preemptions: how many preemptions it may have.
      grace_secs: given to a pod to end by itself.
      working_dir: where the script runs; "" for the image's own.
    """

    name: str
    shape: Shape
    command: tuple[str, ...]
    image: str
    python: str = "python3"
    namespace: str = ""
    port: int = 2222
    cpu: str = ""
    memory: str = ""
    accelerators: Mapping[str, int] = dataclasses.field(default_factory=dict)
    node_selector: Mapping[str, str] = dataclasses.field(default_factory=dict)
    claims: Mapping[str, str] = dataclasses.field(default_factory=dict)
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    max_restarts: int = 3
    max_preemptions: int = 100
    grace_secs: int = 120
    working_dir: str = ""

    @property
    def roles(self) -> dict[str, int]:
        """How many tasks there are of each kind."""
        sizes: dict[str, int] = {}
        for task in self.shape.tasks:
            sizes[task.type] = sizes.get(task.type, 0) + 1
        return sizes

    @property
    def labels(self) -> dict[str, str]:
        """What the objects of this job are found by."""
        return {**_MANAGER, "app.kubernetes.io/instance": self.name}


def literal(text: str) -> str:
    """Text that Kubernetes hands over unchanged: it would put the values of variables in place of $(NAME)."""
    return text.replace("$", "$$")


def metadata(pods: Pods, name: str) -> dict[str, Any]:
    """Name, namespace and labels of an object."""
    namespace = {"namespace": pods.namespace} if pods.namespace else {}
    return {"name": name, **namespace, "labels": pods.labels}


def secret(pods: Pods, value: str) -> dict[str, Any]:
    """What only the members of this job know."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata(pods, pods.name),
        "type": "Opaque",
        "stringData": {"job-secret": value},
    }


def service(pods: Pods) -> dict[str, Any]:
    """The headless Service that gives pods names, before they are ready too: they wait for each other."""
    ports = [{"name": "tasks", "port": pods.port}, {"name": "data", "port": pods.port + 1}]
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(pods, pods.name),
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": pods.labels, "ports": ports},
    }


def network_policy(pods: Pods) -> dict[str, Any]:
    """Lets only the job's own pods in: TensorFlow's servers ask nobody who they are."""
    own = {"matchLabels": pods.labels}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(pods, pods.name),
        "spec": {"podSelector": own, "policyTypes": ["Ingress"], "ingress": [{"from": [{"podSelector": own}]}]},
    }


def indexed_job(pods: Pods, role: str) -> dict[str, Any]:
    """The Job for the tasks of one kind, whose pods are replaced one by one."""
    host = f"{pods.name}-{{type}}-{{index}}.{pods.name}"
    job = plain_job(pods, role, pods.roles[role], _wrapped(pods, role, host, "job"), [GIVEN_UP_EXIT_CODE])
    # With a limit for each index, Kubernetes shows pods how often they were replaced, and waits by index: 10 s after
    # the first failure of four workers that end together, not 80 s.
    job["spec"]["backoffLimitPerIndex"] = pods.max_restarts
    _show_counts(job["spec"]["template"], _JOB_COUNTS)
    return job


def plain_job(
    pods: Pods, role: str, size: int, command: tuple[str, ...], hopeless: Sequence[int] = ()
) -> dict[str, Any]:
    """An Indexed Job in which what was preempted is replaced without counting as a failure."""
    rules = [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "Ignore", "onExitCodes": _codes([PREEMPTED_EXIT_CODE])},
        {"action": "FailJob", "onExitCodes": _codes([*HOPELESS_EXIT_CODES, *hopeless])},
    ]
    spec = _job_spec(size, pods.max_restarts, rules, _template(pods, role, "task", command))
    name = f"{pods.name}-{role}"
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata(pods, name), "spec": spec}


def jobset(pods: Pods) -> dict[str, Any]:
    """A JobSet: when one task fails, all start again together."""
    # A Job that fails by its policy was preempted, and JobSet need not count that.
    rules = [
        {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "FailJob", "onExitCodes": _codes([PREEMPTED_EXIT_CODE])},
    ]
    host = f"{pods.name}-{{type}}-0-{{index}}.{pods.name}"
    jobs = []
    for role, size in pods.roles.items():
        spec = _job_spec(size, 0, rules, _template(pods, role, "task", _wrapped(pods, role, host, "jobset")))
        _show_counts(spec["template"], _JOBSET_COUNTS)
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
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata(pods, pods.name),
        "spec": spec,
    }


def tfjob(pods: Pods) -> dict[str, Any]:
    """A TFJob of Kubeflow's training operator v1, which makes TF_CONFIG itself."""
    names = {"chief": "Chief", "worker": "Worker", "ps": "PS", "evaluator": "Evaluator"}
    replicas = {}
    for role, size in pods.roles.items():
        template = _template(pods, role, "tensorflow", (pods.python, *pods.command))
        template["spec"]["containers"][0]["ports"] = [{"name": "tfjob-port", "containerPort": pods.port}]
        del template["spec"]["restartPolicy"]  # The operator sets it.
        del template["spec"]["subdomain"]
        replicas[names[role]] = {"replicas": size, "restartPolicy": "OnFailure", "template": template}
    spec = {
        "runPolicy": {"backoffLimit": _tfjob_backoff(pods), "cleanPodPolicy": "Running"},
        "successPolicy": "" if pods.shape.num_ps else "AllWorkers",
        "tfReplicaSpecs": replicas,
    }
    return {"apiVersion": "kubeflow.org/v1", "kind": "TFJob", "metadata": metadata(pods, pods.name), "spec": spec}


def _tfjob_backoff(pods: Pods) -> int:
    """The limit of the operator, which adds up the restarts of all containers, and fails the job when they reach it.

    All members restart after each failure: where one has failed, all others miss it.
    """
    return pods.max_restarts * len(pods.shape.members) + 1 if pods.max_restarts else 0


def _codes(values: list[int]) -> dict[str, Any]:
    # The API server takes them in order only.
    return {"containerName": "task", "operator": "In", "values": sorted(values)}


def _wrapped(pods: Pods, role: str, host_format: str, form: str) -> tuple[str, ...]:
    """The script behind the wrapper that finds out which task it is."""
    wrapper = (pods.python, "-P", "-m", "tfdist.launchers.kubernetes_task", *pods.shape.arguments(), f"--role={role}")
    numbers = {"port": pods.port, "max_restarts": pods.max_restarts, "max_preemptions": pods.max_preemptions}
    numbers["grace_period_secs"] = pods.grace_secs
    shown = [f"--{name}={value}" for name, value in numbers.items()]
    return (*wrapper, f"--form={form}", f"--host_format={host_format}", *shown, "--", *pods.command)


def _show_counts(template: dict[str, Any], annotations: Mapping[str, str]) -> None:
    """Adds variables with how often the pod was replaced; they are empty where Kubernetes is older."""
    for name, annotation in annotations.items():
        field = {"fieldPath": f"metadata.annotations['{annotation}']"}
        template["spec"]["containers"][0]["env"].append({"name": name, "valueFrom": {"fieldRef": field}})


def _job_spec(size: int, backoff: int, rules: list[dict[str, Any]], template: dict[str, Any]) -> dict[str, Any]:
    return {
        "completions": size,
        "parallelism": size,
        "completionMode": "Indexed",
        "backoffLimit": backoff,
        "podFailurePolicy": {"rules": rules},
        "template": template,
    }


def _template(pods: Pods, role: str, container_name: str, command: tuple[str, ...]) -> dict[str, Any]:
    computes = any(task.type == role for task in pods.shape.computing)
    accelerators = dict(pods.accelerators) if computes else {}
    asked = {name: value for name, value in (("cpu", pods.cpu), ("memory", pods.memory)) if value}
    volumes = [{"name": f"claim-{i}", "persistentVolumeClaim": {"claimName": c}} for i, c in enumerate(pods.claims)]
    mounts = [{"name": f"claim-{i}", "mountPath": path} for i, path in enumerate(pods.claims.values())]
    if accelerators:
        # The usual 64 MB of /dev/shm are too few for NCCL.
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory"}})
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})
    container: dict[str, Any] = {
        "name": container_name,
        "image": pods.image,
        "command": [literal(word) for word in command],
        "env": _environment(pods, computes),
        "ports": [{"name": "tasks", "containerPort": pods.port}],
    }
    optional = {
        "workingDir": pods.working_dir,
        "resources": {"requests": {**asked, **accelerators}, "limits": accelerators} if asked or accelerators else {},
        "volumeMounts": mounts,
    }
    container |= {key: value for key, value in optional.items() if value}
    if not accelerators:
        container.get("resources", {}).pop("limits", None)
    spec: dict[str, Any] = {"subdomain": pods.name, "restartPolicy": "Never"}
    spec |= {"terminationGracePeriodSeconds": pods.grace_secs, "enableServiceLinks": False}
    if computes and pods.node_selector:
        spec["nodeSelector"] = dict(pods.node_selector)
    spec["containers"] = [container]
    if volumes:
        spec["volumes"] = volumes
    return {"metadata": {"labels": {**pods.labels, "app.kubernetes.io/component": role}}, "spec": spec}


def _environment(pods: Pods, computes: bool) -> list[dict[str, Any]]:
    env: list[dict[str, Any]] = [{"name": name, "value": literal(value)} for name, value in pods.env.items()]
    if pods.accelerators and not computes:
        # Some images and runtimes show every GPU of the node to containers that have asked for none.
        env.append({"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"})
    reference = {"name": pods.name, "key": "job-secret", "optional": True}
    env.append({"name": "TFDIST_JOB_SECRET", "valueFrom": {"secretKeyRef": reference}})
    return env
