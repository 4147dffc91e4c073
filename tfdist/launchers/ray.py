# SPDX-License-Identifier: Apache-2.0
"""Starts a script as every task of a cluster on Ray.

This program is a Ray driver. Its placement group has a bundle for each task. A task runs as the child process of an
actor in its bundle, with `tfdist.launchers.ssh.task` around it. The actor hands input and output through, and
`run_tasks` supervises these tasks as all others. Ray ends the actors when the driver ends in any way, and the child
process ends with its actor.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import json
import logging
import math
import os
import pathlib
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, BinaryIO

from absl import flags

from tfdist import _log, _machine, _sockets
from tfdist.cluster import NOTICES_VARIABLE, Task
from tfdist.launchers import command_line, local, requests, shape
from tfdist.launchers.requests import SENT_PREFIX, LaunchError, Request, Restarts, TaskRequest, json_object, setting
from tfdist.launchers.shape import Shape, SupervisedJob
from tfdist.launchers.ssh import client
from tfdist.launchers.ssh import task as remote
from tfdist.launchers.ssh.launcher import problems_of
from tfdist.launchers.supervise.notices import Reader
from tfdist.launchers.supervise.output import LogSettings
from tfdist.launchers.supervise.processes import PortReservation, RemoteTask, module_command

_USAGE = """\
usage: tfdist launch ray [FLAGS] SCRIPT|-m MODULE [ARGUMENTS]

Starts SCRIPT as every task of a cluster on the nodes of a Ray cluster, and stays until the job is over. Arguments after
SCRIPT are passed to it. All nodes need tfdist, and SCRIPT unless --copy sends it.

  tfdist launch ray --copy --num_workers=4 train.py --epochs=5     for MultiWorkerMirroredStrategy
  tfdist launch ray --copy --num_workers=4 --num_ps=1 train.py     for ParameterServerStrategy: a chief is added
  ray job submit --working-dir . -- tfdist launch ray train.py     goes on without this terminal
"""
# Index of a task's bundle, in its environment.
_BUNDLE_VARIABLE = "TFDIST_RAY_BUNDLE"
# Of 20 attempts to connect, each takes 40 s where the head is lost.
_ATTEMPTS = "RAY_gcs_server_port_wait_time_s"
# Ray's names of resources that are options of an actor.
_OPTIONS = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
# Intervals of looks at what is waited for, and of the lines about resources that are missing.
_LOOK_SECS, _WAITING_SECS = 0.2, 10.0
# Time for an actor to report the end of a task after SIGKILL, before it is given up.
_KILLED_SECS = 3.0
# Time for a cluster to answer, and for a call for output, which without any shows that the actor is there.
_ANSWER_SECS = 5.0


@dataclasses.dataclass(frozen=True)
class RayJob(SupervisedJob):
    """A job on a Ray cluster, where each of its tasks has a bundle of resources.

    Raises:
      LaunchError: a value is out of range.
    """

    address: str = setting("auto", "address of the Ray cluster")
    resources_per_worker: str = setting(
        '{"CPU": 1}', 'Ray\'s resources of each worker, such as \'{"CPU": 2, "GPU": 1}\'; other tasks have a CPU'
    )
    strategy: str = setting("PACK", "of the placement group", ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"))
    copy: bool = setting(False, "send the current directory to the nodes, as Ray's working_dir")
    directory: str = setting("", "working directory on the nodes; by default what --copy sent, else the current one")
    runtime_env: str = setting("{}", 'Ray\'s runtime environment, such as \'{"pip": ["scikit-learn"]}\'')
    bundles: list[dict[str, float]] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.address != "auto" and (wrong := _sockets.address_problem(self.address.removeprefix("ray://"))):
            remedy = "use auto, HOST:6379 or ray://HOST:10001; ray job submit takes http"
            raise LaunchError(f"--address {wrong[0]}; {remedy}. Received: {self.address!r}")
        worker = json_object("resources_per_worker", self.resources_per_worker, '{"CPU": 2}')
        misspelt = [name for name in worker if name not in _OPTIONS and name.upper() in ("CPU", "GPU")]
        are_numbers = all(type(value) in (int, float) and value >= 0 for value in worker.values())
        if misspelt or not are_numbers or not any(worker.values()):
            needed = 'must be numbers by Ray\'s names, not all 0, such as \'{"CPU": 2, "GPU": 1}\''
            raise LaunchError(f"--resources_per_worker {needed}. Received: {self.resources_per_worker}")
        worker = {name: value for name, value in worker.items() if value}  # Ray refuses zeros.
        bundles = [worker if task in self.shape.computing else {"CPU": 1} for task in self.shape.tasks]
        object.__setattr__(self, "bundles", bundles)


def plan(job: RayJob, dropped: Collection[str] = ()) -> Request:
    """Returns the tasks that `run_tasks` would start. Names stand for the addresses, which only actors know.

    Args:
      job: the job.
      dropped: names of workers to leave out. The others are renumbered, and keep their bundles.

    Raises:
      LaunchError: no worker is left.
    """
    left, whole = job.shape.without(dropped)
    stand_ins = [_stand_in(whole[member]) for member in left.members]
    tasks, bundles = [], {task: str(bundle) for bundle, task in enumerate(job.shape.tasks)}
    for task in left.tasks:
        sent = {**left.environment("ray", stand_ins, task), **job.env}
        env = {SENT_PREFIX + name: value for name, value in sent.items()} | {_BUNDLE_VARIABLE: bundles[whole[task]]}
        tasks.append(TaskRequest(str(task), env, ("python", *job.command)))
    return job.request(left, tasks)


def _stand_in(task: Task) -> str:
    return f"{task.type}-{task.index}:2222"


class TaskActor:
    """Actor that runs a task, whose name Ray shows, as a child process. `RayTask` alone calls its methods."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name

    def place(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Starts the child process, which waits for its task; returns the node's address, a free port and versions."""
        self._reserved = PortReservation(1)
        command = module_command(remote.__name__)
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self._outputs = selectors.DefaultSelector()
        for number, stream in ((1, self._child.stdout), (2, self._child.stderr)):
            self._outputs.register(stream.fileno(), selectors.EVENT_READ, number)
        return {"host": _ray().util.get_node_ip_address(), "port": self._reserved.ports[0], **remote.probe(asked)}

    def write(self, data: bytes) -> None:
        """Writes to the child process: its task, then signals and notices."""
        with contextlib.suppress(OSError):  # The child process has ended.
            self._child.stdin.write(data)
            self._child.stdin.flush()

    def read(self) -> tuple[list[tuple[int, bytes]], int | None]:
        """Waits for output of the task, and returns it by descriptor; with the last of it, the exit code."""
        parts = []
        for key, _ in self._outputs.select(_ANSWER_SECS):
            parts.append((key.data, os.read(key.fd, 1 << 16)))
            if not parts[-1][1]:
                self._outputs.unregister(key.fileobj)
        return parts, None if self._outputs.get_map() else self._child.wait()


class Actors:
    """Starts the tasks of a job, each in an actor of its own, in its bundle of the job's placement group.

    Attributes:
      addresses: for each attempt the addresses by stand-in, as the actors report them.
      waiting: bundle of each task that waits for its actor.
    """

    def __init__(self, job: RayJob) -> None:
        self.job = job
        self.addresses: dict[str, dict[str, str]] = {}
        self.waiting: dict[str, int] = {}
        self._over = threading.Event()
        self._group = _ray().util.placement_group(job.bundles, strategy=job.strategy)
        threading.Thread(target=self._say_missing, name="tfdist waiting", daemon=True).start()

    def start(self, name: str, command: Sequence[str], env: Mapping[str, str] | None) -> tuple[Any, RemoteTask]:
        """Starts a task. See `processes.Start`."""
        task = RayTask(self, name, command[1:], env or {})
        guard = RemoteTask(name, task.follow, task.pass_on, remote.HEARTBEAT_SECS)
        return guard.control, guard

    def create(self, name: str, bundle: int) -> Any:
        """Returns an actor, which starts once its bundle has its resources."""
        ray, more = _ray(), dict(self.job.bundles[bundle])
        known = {flag: more.pop(key) for key, flag in _OPTIONS.items() if key in more}
        place = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(self._group, bundle)
        # One thread each, so that what is written or read keeps its order.
        actor = ray.remote(max_restarts=0, concurrency_groups={"input": 1, "output": 1})(TaskActor)
        self.waiting[name] = bundle
        return actor.options(**{"num_cpus": 0, **known}, resources=more, scheduling_strategy=place).remote(name)

    def _say_missing(self) -> None:
        ray = _ray()
        while not self._over.wait(_WAITING_SECS):
            waits = dict(sorted(self.waiting.copy().items()))
            with contextlib.suppress(ray.exceptions.RayError):
                placed = ray.util.placement_group_table(self._group)["bundles_to_node_id"]
                wanted = {name: self.job.bundles[bundle] for name, bundle in waits.items() if not placed.get(bundle)}
                if wanted:
                    _log.say(missing(wanted, ray.cluster_resources(), ray.available_resources()))
                elif waits:
                    _log.say(f"{', '.join(waits)} have their resources, and Ray starts their processes")

    def remove(self) -> None:
        """Ends all actors, and frees the resources."""
        self._over.set()
        _ray().util.remove_placement_group(self._group)


def missing(wanted: Mapping[str, Mapping[str, float]], total: Mapping[str, float], free: Mapping[str, float]) -> str:
    """Returns the line about tasks that wait for resources; `total` and `free` are those of the cluster."""
    sums = {name: sum(each.get(name, 0) for each in wanted.values()) for each in wanted.values() for name in each}
    lacks = [
        f"{name} {count - have:g} ({have:g} of {total.get(name, 0):g} free, {count:g} asked)"
        for name, count in sums.items()
        if (have := free.get(name, 0)) < count
    ]
    what = f"missing are {', '.join(lacks)}" if lacks else "enough is free, but not on nodes as --strategy asks"
    return f"{', '.join(wanted)} wait for resources: {what}; they start as nodes join or jobs end, or ask for less"


class RayTask:
    """A task in an actor. See `RemoteTask`."""

    def __init__(self, actors: Actors, name: str, script: Sequence[str], env: Mapping[str, str]) -> None:
        self._actors, self._name, self._script, self._env = actors, name, script, env
        self._notices = Reader(env.get(NOTICES_VARIABLE))
        self._is_running, self._signum, self._killed_secs = False, 0, math.inf
        self._actor: Any = None

    def follow(self, outputs: Mapping[int, BinaryIO]) -> int:
        """Runs the task; returns its exit code."""
        self._outputs = outputs
        try:
            return self._follow()
        except InterruptedError:
            return -self._signum
        except Exception as error:  # Ray's are of several kinds.
            self._say(f"the actor of {self._name} is lost: {_reason(error)}")
            return remote.LOST_EXIT_CODE
        finally:
            self._actors.waiting.pop(self._name, None)
            with contextlib.suppress(Exception):
                _ray().kill(self._actor)

    def pass_on(self, signums: bytes) -> None:
        """Sends signals and notices to the task."""
        self._signum = signums[-1] or self._signum
        if signal.SIGKILL in signums:
            self._killed_secs = min(self._killed_secs, time.monotonic() + _KILLED_SECS)
        if self._is_running:
            lines = (bytes([remote.NOTICE]) + line.encode() + b"\n" for line in self._notices.new_lines())
            self._input(signums + b"".join(lines))

    def _follow(self) -> int:
        job, bundle = self._actors.job, int(self._env[_BUNDLE_VARIABLE])
        self._actor = self._actors.create(self._name, bundle)
        directory, files = job.directory or ".", [] if self._script[0] == "-m" else [self._script[0]]
        asked = {"directory": directory, "files": files, "ports": (), "gpus": 0}
        answer = self._get(self._actor.place.remote(asked))
        self._actors.waiting.pop(self._name, None)
        if problems := problems_of(answer, asked, remote.versions()):
            self._say(*(f"node {answer['host']} {each}, or --copy" for each in problems))
            return 2  # As of a wrong command line.
        env = self._with_addresses(_stand_in(job.shape.tasks[bundle]), answer["host"], answer["port"])
        # In this order, so that no signal is written before the task, or is lost.
        self._input(client.payload(self._script, directory, env))
        self._is_running = True
        if self._signum:
            raise InterruptedError
        code = None
        while code is None:
            parts, code = self._get(self._actor.read.options(concurrency_group="output").remote())
            for number, data in parts:
                self._outputs[number].write(data)
        return requests.shell_code(code)

    def _with_addresses(self, own: str, host: str, port: int) -> dict[str, str]:
        """Returns the task's environment with the addresses of all members, once all have one."""
        variable, attempt = SENT_PREFIX + "TF_CONFIG", self._env["TFDIST_ATTEMPT"]
        addresses = self._actors.addresses.setdefault(attempt, {})
        known = addresses.setdefault(own, f"{host}:{port}").rpartition(":")[0]
        if known != host:  # It was started again alone.
            raise OSError(f"it is on {host} now, and the others know {known}; only a start of all tasks mends it")
        config = self._env[variable]
        for stand_in in map(_stand_in, self._actors.job.shape.tasks):
            if f'"{stand_in}"' in config:
                while stand_in not in addresses:
                    self._check()
                    time.sleep(_LOOK_SECS)
                config = config.replace(f'"{stand_in}"', f'"{addresses[stand_in]}"')
        return {**self._env, variable: config}

    def _get(self, reference: Any) -> Any:
        while not _ray().wait([reference], timeout=_LOOK_SECS)[0]:
            self._check()
        return _ray().get(reference)

    def _check(self) -> None:
        """Raises an InterruptedError if a signal has ended the task before its start, or SIGKILL seems lost."""
        if time.monotonic() > self._killed_secs or (self._signum and not self._is_running):
            raise InterruptedError

    def _say(self, *lines: str) -> None:
        self._outputs[2].write("".join(f"{_log.PREFIX}{line}\n" for line in lines).encode())

    def _input(self, data: bytes) -> None:
        with contextlib.suppress(Exception):  # `_follow` finds out if the actor is lost.
            self._actor.write.options(concurrency_group="input").remote(data)


def _reason(error: Exception) -> str:
    """Returns the line of Ray's error that says why, without advice."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    if any("No module named" in line for line in lines):
        return f'{lines[-1]}; install it on the nodes, or name a wheel by --runtime_env=\'{{"pip": ["URL"]}}\''
    return lines[-1].partition(" There are some potential")[0][:300].rstrip(".")


def define_flags(values: flags.FlagValues) -> None:
    """Defines this platform's flags."""
    shape.define_flags(values, Shape, RayJob, Restarts, LogSettings)


def run(*command: str, **options: object) -> None:
    """Runs a job from a notebook or a Ray driver, and returns once it has ended: `run("train.py", num_workers=4)`.

    Args:
      *command: the script and its arguments, or "-m", a module and its arguments.
      **options: flags of `tfdist launch ray`; those of JSON as a dict.

    Raises:
      LaunchError: the job is invalid, or there is no Ray cluster.
      FlagError: an option is unknown, or its value can't be parsed.
      subprocess.CalledProcessError: the job has failed; `returncode` is that of the first task which failed.
    """
    arguments = []
    for name, value in options.items():
        for each in value if isinstance(value, list | tuple) else (value,):
            arguments.append(f"--{name}={json.dumps(each) if isinstance(each, dict) else each}")
    if code := main([*arguments, *command]):
        raise subprocess.CalledProcessError(code, ["tfdist", "launch", "ray", *arguments, *command])


def _launch(values: flags.FlagValues, command: Sequence[str]) -> int:
    job = shape.job_from_flags(RayJob, values, command)
    runtime_env = json_object("runtime_env", job.runtime_env, '{"pip": ["scikit-learn"]}')
    logs = command_line.from_settings(LogSettings, values)
    if job.copy:
        requests.check_command(job.command)
        runtime_env["working_dir"] = str(pathlib.Path.cwd())
    bundles = ", ".join(f"{task} {json.dumps(each)}" for task, each in zip(job.shape.tasks, job.bundles, strict=True))
    asked = f"# Ray at {job.address}: placement group {job.strategy} of {bundles}; runtime environment {runtime_env}"
    return command_line.submit_or_show(values, f"{asked}\n\n{plan(job)}", lambda: _submit(job, runtime_env, logs))


main = functools.partial(command_line.run_command, _USAGE, define_flags, run=_launch)


def _submit(job: RayJob, runtime_env: Mapping[str, Any], logs: LogSettings) -> int:
    """Runs a job on a cluster, and connects to the cluster for that time unless this program is connected."""
    ray = _ray()
    was_connected = ray.is_initialized()
    if was_connected and runtime_env:
        late = "this program is connected to Ray, so that --copy and --runtime_env come too late"
        raise LaunchError(f"{late}; use ray.init(runtime_env=...). Received: {json.dumps(runtime_env)}")
    try:
        if not was_connected:
            head = job.address.removeprefix("ray://")
            if head != "auto" and (error := _sockets.connection_error(head, _ANSWER_SECS)):
                raise error  # Ray itself would try for minutes.
            with _machine.environment({_ATTEMPTS: os.environ.get(_ATTEMPTS, "1")}):
                ray.init(job.address, runtime_env=runtime_env or None, log_to_driver=False, logging_level=logging.ERROR)
        if not job.directory and not ray.get_runtime_context().runtime_env.get("working_dir"):
            job = dataclasses.replace(job, directory=str(pathlib.Path.cwd()))
        actors = Actors(job)
    except (OSError, RuntimeError, ValueError) as error:  # Of the connection, of Ray and of an unknown host.
        remedy, asked = "start a cluster with `ray start --head`, or name one", f"--address={job.address}"
        raise LaunchError(f"Ray refuses the job: {_reason(error)}; {remedy}. Received: {asked}") from None
    config = json.loads(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}"))  # Of a job that was submitted.
    if number := config.get("metadata", {}).get("job_submission_id"):
        shown = f"ray job status {number}   shows the job", f"ray job logs --follow {number}   follows its output"
        _log.say(*shown, f"ray job stop {number}   ends it")
    try:
        return local.submit_with_secret(functools.partial(plan, job), logs, actors.start)
    finally:
        actors.remove()
        if not was_connected:
            ray.shutdown()


def _ray() -> Any:
    """Returns the package, which only this launcher needs."""
    try:
        return importlib.import_module("ray")
    except ImportError:
        raise LaunchError(f"{sys.executable} has no package ray; pip install '.[ray]' in a checkout") from None
