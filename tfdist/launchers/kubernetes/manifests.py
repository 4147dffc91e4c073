# SPDX-License-Identifier: Apache-2.0
"""Kubernetes objects of a job, as plain data.

One Indexed Job for each kind of task, so that parameter servers need not have the workers' GPUs. A headless Service
gives each pod a name; a NetworkPolicy admits only the job's own pods.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping
from typing import Any

from tfdist.cluster import JOB_SECRET_VARIABLE
from tfdist.launchers.kubernetes import task as kubernetes_task
from tfdist.launchers.requests import HOPELESS_EXIT_CODES, TRY_AGAIN_EXIT_CODE, setting
from tfdist.launchers.shape import Job

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
