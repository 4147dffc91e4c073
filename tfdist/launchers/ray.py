# SPDX-License-Identifier: Apache-2.0
"""Starts a script as every task of a cluster on Ray.

This program is a Ray driver. Its placement group has a bundle for each task. A task runs as the child process of an
actor in its bundle, with `tfdist.launchers.ssh.task` around it. The actor hands input and output through; `RayTask`
stands for the guard of a local task, so that `run_tasks` supervises these tasks as all others. Ray ends the actors when
the driver ends in any way, and the child process ends with its actor.
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
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from absl import flags

from tfdist import _log
from tfdist.cluster import NOTICES_VARIABLE, Task
from tfdist.launchers import command_line, local, requests, shape
from tfdist.launchers.requests import SENT_PREFIX, LaunchError, Request, Restarts, TaskRequest, check_command, setting
from tfdist.launchers.shape import Shape, SupervisedJob
from tfdist.launchers.ssh import client
from tfdist.launchers.ssh import task as remote
from tfdist.launchers.ssh.launcher import problems_of
from tfdist.launchers.supervise.notices import Reader
from tfdist.launchers.supervise.output import LogSettings
from tfdist.launchers.supervise.processes import PortReservation, module_command

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
# Ray's names of resources that are options of an actor.
_OPTIONS = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
_LOOK_SECS = 0.2
# Interval of the lines about resources that are missing.
_WAITING_SECS = 10.0
# Time for an actor to report the end of a task after SIGKILL, before it is given up.
_KILLED_SECS = 3.0
# A call for output that returns without any tells the driver that the actor is there.
_READ_SECS = 5.0


@dataclasses.dataclass(frozen=True)
class RayJob(SupervisedJob):
    """A job on a Ray cluster.

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

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.address.startswith("http"):
            remedy = "use auto, HOST:6379 or ray://HOST:10001; ray job submit takes http"
            raise LaunchError(f"--address is not that of a Ray cluster; {remedy}. Received: {self.address!r}")
        values = self.worker_resources.values()
        misspelt = [name for name in self.worker_resources if name not in _OPTIONS and name.upper() in ("CPU", "GPU")]
        if not any(values) or not all(type(value) in (int, float) and value >= 0 for value in values) or misspelt:
            raise LaunchError(
                '--resources_per_worker must be numbers by name, not all 0, such as {"CPU": 2, "GPU": 1}. Received: '
                f"{self.resources_per_worker}"
            )

    @property
    def worker_resources(self) -> dict[str, float]:
        """Ray's resources of each worker."""
        return _object("resources_per_worker", self.resources_per_worker)

    @property
    def bundles(self) -> list[dict[str, float]]:
        """Resources of each of the shape's tasks, without zeros."""
        worker = {name: value for name, value in self.worker_resources.items() if value}
        computing = set(self.shape.computing)
        return [worker if task in computing else {"CPU": 1} for task in self.shape.tasks]


def _object(flag: str, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        example = '{"pip": ["scikit-learn"]}' if flag == "runtime_env" else '{"CPU": 1}'
        raise LaunchError(f"--{flag} is no JSON object; write it as --{flag}='{example}'. Received: {text}")
    return found


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
        env = {SENT_PREFIX + name: value for name, value in sent.items()}
        env[_BUNDLE_VARIABLE] = bundles[whole[task]]
        tasks.append(TaskRequest(str(task), env, ("python", *job.command)))
    return job.request(left, tasks)


def _stand_in(task: Task) -> str:
    return f"{task.type}-{task.index}:2222"


class TaskActor:
    """Actor that runs a task as a child process. Its methods are called by `RayTask` alone.

    Args:
      name: name of the task, which Ray shows.
    """

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
        host = _ray().util.get_node_ip_address()
        return {"host": host, "port": self._reserved.ports[0], **remote.probe(asked)}

    def write(self, data: bytes) -> None:
        """Writes to the child process: its task, then signals and notices."""
        with contextlib.suppress(OSError):  # The child process has ended.
            self._child.stdin.write(data)
            self._child.stdin.flush()

    def read(self) -> tuple[list[tuple[int, bytes]], int | None]:
        """Waits for output of the task, and returns it by descriptor; with the last of it, the exit code."""
        parts = []
        for key, _ in self._outputs.select(_READ_SECS):
            parts.append((key.data, os.read(key.fd, 1 << 16)))
            if not parts[-1][1]:
                self._outputs.unregister(key.fileobj)
        return parts, None if self._outputs.get_map() else self._child.wait()


class Actors:
    """Starts the tasks of a job, each in an actor of its own, in its bundle of the job's placement group.

    Args:
      job: the job.

    Attributes:
      addresses: addresses by attempt and stand-in, as the actors report them.
      waiting: bundle of each task that waits for its actor, and the time since then.
    """

    def __init__(self, job: RayJob) -> None:
        self.job = job
        self.addresses: dict[tuple[str, str], str] = {}
        self.waiting: dict[str, tuple[int, float]] = {}
        self._over = threading.Event()
        self._group = _ray().util.placement_group(job.bundles, strategy=job.strategy)
        threading.Thread(target=self._say_missing, name="tfdist waiting", daemon=True).start()

    def start(self, name: str, command: Sequence[str], env: Mapping[str, str] | None) -> tuple[socket.socket, RayTask]:
        """Starts a task. See `processes.Start`."""
        task = RayTask(self, name, command[1:], env or {})
        return task.control, task

    def create(self, name: str, bundle: int) -> Any:
        """Returns an actor, which starts once its bundle has its resources."""
        ray, more = _ray(), dict(self.job.bundles[bundle])
        known = {flag: more.pop(key) for key, flag in _OPTIONS.items() if key in more}
        place = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(self._group, bundle)
        # One thread each, so that what is written or read keeps its order.
        actor = ray.remote(max_restarts=0, concurrency_groups={"input": 1, "output": 1})(TaskActor)
        self.waiting[name] = bundle, time.monotonic()
        return actor.options(**{"num_cpus": 0, **known}, resources=more, scheduling_strategy=place).remote(name)

    def _say_missing(self) -> None:
        ray = _ray()
        while not self._over.wait(_WAITING_SECS):
            since = time.monotonic() - _WAITING_SECS / 2
            waits = {name: bundle for name, (bundle, secs) in sorted(self.waiting.items()) if secs < since}
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
        f"{name} {count - free.get(name, 0):g} ({free.get(name, 0):g} of {total.get(name, 0):g} free, {count:g} asked)"
        for name, count in sums.items()
        if count > free.get(name, 0)
    ]
    what = f"missing are {', '.join(lacks)}" if lacks else "enough is free, but not on nodes as --strategy asks"
    is_too_much = any(count > total.get(name, 0) for name, count in sums.items())
    remedy = "join, or use less of --num_workers or --resources_per_worker" if is_too_much else "join or jobs end"
    return f"{', '.join(wanted)} wait for resources: {what}; they start as nodes {remedy}"


class RayTask:
    """A task in an actor, in place of the guard of a local task: with its output, and what `guard.py` reports.

    Attributes:
      control: takes signals, and reports the end of the task.
      stdout: standard output of the task.
      stderr: standard error of the task.
    """

    def __init__(self, actors: Actors, name: str, script: Sequence[str], env: Mapping[str, str]) -> None:
        self._actors, self._name, self._script, self._env = actors, name, script, env
        self._signum = 0
        self._killed_secs = math.inf
        self._is_running = False
        self._actor: Any = None
        self.control, self._control = socket.socketpair()
        (out, to_out), (err, to_err) = os.pipe(), os.pipe()
        self.stdout, self.stderr = os.fdopen(out, "rb", 0), os.fdopen(err, "rb", 0)
        self._outputs = {1: os.fdopen(to_out, "wb"), 2: os.fdopen(to_err, "wb")}
        self._thread = threading.Thread(target=self._run, name=f"tfdist actor of {name}", daemon=True)
        self._thread.start()
        threading.Thread(target=self._forward, name=f"tfdist signals to {name}", daemon=True).start()

    def wait(self) -> int:
        """Waits until the task has ended. Its exit code was reported before."""
        self._thread.join()
        return 0

    def _run(self) -> None:
        try:
            code = self._follow()
        except InterruptedError:
            code = -self._signum
        except Exception as error:  # Ray's are of several kinds.
            code = remote.LOST_EXIT_CODE
            self._say(f"the actor of {self._name} is lost: {_reason(error)}")
        self._actors.waiting.pop(self._name, None)
        with contextlib.suppress(Exception):
            _ray().kill(self._actor)
        for each in self._outputs.values():
            each.close()
        with contextlib.suppress(OSError):
            self._control.send(f"exit {code}\ndone\n".encode())
            self._control.shutdown(socket.SHUT_RDWR)

    def _follow(self) -> int:
        """Runs the task; returns its exit code."""
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
                self._outputs[number].flush()
        return requests.shell_code(code)

    def _with_addresses(self, own: str, host: str, port: int) -> dict[str, str]:
        """Returns the task's environment with the addresses of all members, once all have one.

        Raises:
          OSError: a task that is started again alone has another address than the others know.
        """
        variable, attempt, addresses = SENT_PREFIX + "TF_CONFIG", self._env["TFDIST_ATTEMPT"], self._actors.addresses
        known = addresses.setdefault((attempt, own), f"{host}:{port}").rpartition(":")[0]
        if known != host:
            raise OSError(f"it is on {host} now, and the others know {known}; only a start of all tasks mends it")
        config = self._env[variable]
        for stand_in in map(_stand_in, self._actors.job.shape.tasks):
            if f'"{stand_in}"' in config:
                while (attempt, stand_in) not in addresses:
                    self._check()
                    time.sleep(_LOOK_SECS)
                config = config.replace(f'"{stand_in}"', f'"{addresses[attempt, stand_in]}"')
        return {**self._env, variable: config}

    def _get(self, reference: Any) -> Any:
        ray = _ray()
        while not ray.wait([reference], timeout=_LOOK_SECS)[0]:
            self._check()
        return ray.get(reference)

    def _check(self) -> None:
        """Raises an InterruptedError if a signal has ended the task before its start, or SIGKILL seems lost."""
        if time.monotonic() > self._killed_secs or (self._signum and not self._is_running):
            raise InterruptedError

    def _forward(self) -> None:
        """Forwards signals and notices to the task, and a zero byte when there are none."""
        notices = Reader(self._env.get(NOTICES_VARIABLE))
        self._control.settimeout(remote.HEARTBEAT_SECS)
        data = b"-"
        while data:
            try:
                data = self._control.recv(4096)
                self._signum = data[-1] if data else self._signum
            except TimeoutError:
                data = b"\0"
            except OSError:
                break
            if signal.SIGKILL in data:
                self._killed_secs = min(self._killed_secs, time.monotonic() + _KILLED_SECS)
            if self._is_running:
                lines = (bytes([remote.NOTICE]) + line.encode() + b"\n" for line in notices.new_lines())
                self._input(data + b"".join(lines))
        self._control.close()

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
    return lines[-1].partition(" There are some potential")[0][:300]


def define_flags(values: flags.FlagValues) -> None:
    """Defines this platform's flags."""
    shape.define_flags(values, Shape, RayJob, Restarts, LogSettings)


def main(arguments: Sequence[str]) -> int:
    """Runs `tfdist launch ray`. See `command_line.run_command`."""
    return command_line.run_command(_USAGE, define_flags, arguments, _launch)


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
            text = json.dumps(each) if isinstance(each, dict) else str(each)
            arguments.append(f"--{name}={text}")
    if code := main([*arguments, *command]):
        raise subprocess.CalledProcessError(code, ["tfdist", "launch", "ray", *arguments, *command])


def _launch(values: flags.FlagValues, command: Sequence[str]) -> int:
    job = shape.job_from_flags(RayJob, values, command)
    runtime_env = _object("runtime_env", job.runtime_env)
    logs = command_line.from_settings(LogSettings, values)
    if job.copy:
        check_command(job.command)
        runtime_env["working_dir"] = str(pathlib.Path.cwd())
    return command_line.submit_or_show(values, plan(job), lambda: _submit(job, runtime_env, logs))


def _submit(job: RayJob, runtime_env: Mapping[str, Any], logs: LogSettings) -> int:
    """Runs a job on a cluster, and connects to the cluster for that time unless this program is connected."""
    ray = _ray()
    was_connected = ray.is_initialized()
    if was_connected and runtime_env:
        raise LaunchError(
            "this program is connected to Ray, so that --copy and --runtime_env come too late; use "
            f"ray.init(runtime_env=...). Received: {json.dumps(runtime_env)}"
        )
    try:
        if not was_connected:
            options = {"log_to_driver": False, "logging_level": logging.ERROR}
            ray.init(address=job.address, runtime_env=runtime_env or None, **options)
        if not job.directory and not ray.get_runtime_context().runtime_env.get("working_dir"):
            job = dataclasses.replace(job, directory=str(pathlib.Path.cwd()))
        actors = Actors(job)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise LaunchError(
            f"Ray refuses the job: {_reason(error)}; start a cluster with `ray start --head`, or name one. Received: "
            f"--address={job.address}"
        ) from None
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
    """Returns the package, which only this launcher needs.

    Raises:
      LaunchError: Ray is not installed.
    """
    try:
        return importlib.import_module("ray")
    except ImportError:
        raise LaunchError(f"{sys.executable} has no package ray; pip install '.[ray]' in a checkout") from None
