# SPDX-License-Identifier: Apache-2.0
"""Starts a script as every task of a job on Kubernetes, which needs no additional software there.

`plan` renders the manifests, `submit` passes them to `kubectl`; a dry run prints them. In each pod,
`tfdist.launchers.kubernetes_task` determines the pod's task.
"""

from __future__ import annotations

import dataclasses
import os
import re
import secrets
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags

from tfdist.launchers import (
    command_line,
    communication,
    kubernetes_submit,
    manifests,
    shape,
    telemetry,
    tf_log_level,
    tools,
    yaml_text,
)
from tfdist.launchers.manifests import Pods
from tfdist.launchers.requests import LaunchError
from tfdist.launchers.shape import Shape

_USAGE = """\
usage: tfdist launch kubernetes --image=IMAGE [FLAGS] SCRIPT [ARGUMENTS]
       tfdist launch kubernetes --image=IMAGE [FLAGS] -m MODULE [ARGUMENTS]

Creates Indexed Jobs that run SCRIPT, a path in IMAGE, as every task of a cluster. Arguments after SCRIPT are passed to
it. tfdist has to be installed in the image.

  tfdist launch kubernetes --image=me/train:1 --num_workers=4 --gpus_per_worker=1 /app/train.py --epochs=5

flags (also from a file, with --flagfile=FILE):
"""
_NAME = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?", re.ASCII)
_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|[kMGTPE]i?)?", re.ASCII)
_LABEL = 63


@dataclasses.dataclass(frozen=True)
class KubernetesRequest:
    """The Kubernetes objects to create, and the description of their job."""

    objects: tuple[Mapping[str, Any], ...]
    pods: Pods

    def __str__(self) -> str:
        return yaml_text.documents(self.objects)


def plan(pods: Pods, form: str = "job") -> KubernetesRequest:
    """Renders the objects that `submit` would create, without the Secret.

    Args:
      pods: the job.
      form: "job" for Indexed Jobs, "jobset" for a JobSet, "tfjob" for a TFJob.

    Raises:
      LaunchError: a value is out of range, or is an invalid name of an object or host.
    """
    check(pods)
    if form == "tfjob":
        return KubernetesRequest((manifests.network_policy(pods), manifests.tfjob(pods)), pods)
    if form == "jobset":
        # The JobSet controller creates the Service.
        return KubernetesRequest((manifests.network_policy(pods), manifests.jobset(pods)), pods)
    jobs = [manifests.indexed_job(pods, role) for role in pods.roles]
    return KubernetesRequest((manifests.service(pods), manifests.network_policy(pods), *jobs), pods)


def check(pods: Pods) -> None:
    """Checks the rules that Kubernetes' schemas don't check.

    Raises:
      LaunchError: a value is out of range, or is an invalid name of an object or host.
    """
    if not pods.command:
        raise LaunchError("there is no script to run; name one after the flags. Received: nothing")
    if not pods.image:
        raise LaunchError("--image is missing; name the image in which the script and tfdist are. Received: nothing")
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
    kubectl = tools.find("kubectl", "install it, or look at the manifests with --dry_run")
    pods = request.pods
    text = yaml_text.documents([manifests.secret(pods, secrets.token_hex(32)), *request.objects])
    where = (f"--namespace={pods.namespace}",) if pods.namespace else ()
    chosen = (f"--selector=app.kubernetes.io/instance={pods.name}", *where)
    kinds = ("secret", *dict.fromkeys(str(each["kind"]).lower() for each in request.objects))
    job = kubernetes_submit.Job(pods.name, text, kinds, chosen, len(pods.shape.tasks))
    kubernetes_submit.create(kubectl, job)
    logs = f"kubectl logs --follow --prefix --max-log-requests={len(pods.shape.tasks)} {' '.join(chosen)}"
    sys.stderr.write(
        f"tfdist: {logs}   shows what the tasks print\ntfdist: {job.removal}   ends the job and removes all of it\n"
    )
    return kubernetes_submit.look(kubectl, job, start_timeout_secs) if start_timeout_secs else 0


def define_flags(values: flags.FlagValues) -> None:
    """Defines this platform's flags."""
    shape.define_flags(values)
    define_pod_flags(values)
    flags.DEFINE_string("gpu_resource", "nvidia.com/gpu", "what a GPU is called in the cluster", flag_values=values)
    flags.DEFINE_integer("gpus_per_worker", 0, "GPUs for each worker", flag_values=values)
    flags.DEFINE_integer("max_preemptions", 100, "preemptions that the job may have", flag_values=values)
    communication.define_flag(values)
    telemetry.define_flag(values)
    forms = "job: Indexed Jobs; jobset: a JobSet, which starts all again when one fails; tfjob: Kubeflow's TFJob"
    flags.DEFINE_enum("form", "job", ["job", "jobset", "tfjob"], forms, flag_values=values)


def define_pod_flags(values: flags.FlagValues) -> None:
    """Defines the flags for the properties of every pod."""
    texts = {
        "image": ("", "image of the container, with the script and tfdist in it"),
        "name": ("tfdist", "name of the job"),
        "namespace": ("", "namespace; the one that kubectl is set to by default"),
        "python": ("python3", "interpreter in the image"),
        "working_dir": ("", "where the script runs; the image's own by default"),
        "cpu": ("", "cores for each pod, such as 4 or 500m"),
        "memory": ("", "memory for each pod, such as 16Gi"),
    }
    for name, (default, text) in texts.items():
        flags.DEFINE_string(name, default, text, flag_values=values)
    numbers = {
        "port": (2222, "port of every task; the chief's tf.data service has the next"),
        "max_restarts": (3, "failures that the job may have; preemptions don't count"),
        "grace_period_secs": (120, "seconds that a pod has to save its work after SIGTERM"),
    }
    for name, (default, text) in numbers.items():
        flags.DEFINE_integer(name, default, text, flag_values=values)
    text = "seconds to look whether the job's pods can be created; 0 for not at all"
    flags.DEFINE_float("start_timeout_secs", 20.0, text, flag_values=values)
    repeated = {
        "env": "NAME=VALUE for all tasks; may be repeated",
        "node_selector": "LABEL=VALUE of the nodes for workers; may be repeated",
        "claim": "NAME=DIRECTORY: where a volume claim is mounted; may be repeated",
    }
    for name, text in repeated.items():
        flags.DEFINE_multi_string(name, [], text, flag_values=values)
    tf_log_level.define_flag(values)
    flags.DEFINE_boolean("dry_run", False, "print the manifests, create nothing", flag_values=values)


def pods_from_flags(values: flags.FlagValues, command: Sequence[str], job: Shape, **more: Any) -> Pods:
    """Returns the job that the command line describes.

    Raises:
      LaunchError: a flag is invalid.
    """
    shape.check_duration("start_timeout_secs", values.start_timeout_secs)
    same = ("image", "name", "namespace", "python", "working_dir", "cpu", "memory", "port", "max_restarts")
    pods = Pods(
        shape=job,
        command=tuple(command),
        env=tf_log_level.environment(values.tf_log_level, os.environ) | tools.parse_environment("env", values.env),
        node_selector=_pairs("node_selector", values.node_selector),
        claims=_pairs("claim", values.claim),
        grace_secs=values.grace_period_secs,
        **{name: getattr(values, name) for name in same},
    )
    return dataclasses.replace(pods, **more)


def _pairs(flag: str, settings: Sequence[str]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for setting in settings:
        key, _, value = setting.partition("=")
        pairs[key] = value
    for key, value in pairs.items():
        if not key or not value:
            raise LaunchError(f"--{flag} is no pair; write NAME=VALUE. Received: {key!r}={value!r}")
    return pairs


def main(arguments: Sequence[str]) -> int:
    """Runs `tfdist launch kubernetes`. See `command_line.run`."""
    return command_line.run(_USAGE, define_flags, arguments, _launch)


def _launch(values: flags.FlagValues, command: Sequence[str]) -> int:
    gpus = {values.gpu_resource: values.gpus_per_worker} if values.gpus_per_worker else {}
    more = {"accelerators": gpus, "max_preemptions": values.max_preemptions}
    pods = pods_from_flags(values, command, Shape.from_flags(values), **more)
    env = communication.environment(values.communication) | telemetry.environment(values.telemetry) | dict(pods.env)
    pods = dataclasses.replace(pods, env=env)
    request = plan(pods, values.form)
    return command_line.submit_or_show(values, request, lambda: submit(request, values.start_timeout_secs))
