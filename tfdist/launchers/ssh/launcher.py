# SPDX-License-Identifier: Apache-2.0
"""Starts a script as every task of a cluster on remote machines, by ssh.

Each task has a local process that holds its connection (`tfdist.launchers.ssh.client`); on the remote machine
`tfdist.launchers.ssh.task` runs the task. `plan` assigns tasks to hosts, `run_tasks` runs them, a dry run prints the
plan.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import functools
import json
import pathlib
import re
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from absl import flags

from tfdist import _log, _sockets
from tfdist.cluster import Task
from tfdist.launchers import command_line, local, requests, shape
from tfdist.launchers.environment import VISIBLE
from tfdist.launchers.requests import SENT_PREFIX, LaunchError, Request, Restarts, TaskRequest, read_file, setting
from tfdist.launchers.shape import Shape, SupervisedJob
from tfdist.launchers.ssh import client as ssh_client
from tfdist.launchers.ssh.task import ORPHAN_SECS, versions
from tfdist.launchers.supervise.output import LogSettings

_USAGE = """\
usage: tfdist launch ssh --hosts=HOST[:SLOTS],... [FLAGS] SCRIPT [ARGUMENTS]
       tfdist launch ssh --hostfile=FILE [FLAGS] -m MODULE [ARGUMENTS]

Starts SCRIPT as every task of a cluster on these hosts, and stays until the job is over. Arguments after SCRIPT are
passed to it. SCRIPT is looked for on each host, which needs the same Python and tfdist, and an ssh login without a
password.

  tfdist launch ssh --hosts=a:2,b:2 train.py --epochs=5     four workers, for MultiWorkerMirroredStrategy
  tfdist launch ssh --hostfile=hosts --num_ps=1 train.py    for ParameterServerStrategy: a chief is added
"""


@dataclasses.dataclass(frozen=True)
class SshJob(SupervisedJob):
    """A job on remote machines.

    Args:
      hosts: the machines; their slots are filled in this order: workers, parameter servers, chief, evaluator.

    Raises:
      LaunchError: a value is out of range, or there are too few slots.
    """

    hosts: tuple[Host, ...] = ()
    directory: str = setting("", "working directory; the current one by default")
    python: str = setting(sys.executable, "interpreter on the hosts")
    port: int = setting(2222, "first port of each host; its tasks count up from there", least=1)
    gpus_per_worker: int | None = setting(None, "GPUs for each worker; by default what the host shows", int)
    ssh: tuple[str, ...] = setting((), "one more option of ssh, such as -p2222; may be repeated")
    setup: str = setting("", "shell command on each host before its tasks, such as '. venv/bin/activate'")
    preflight_secs: float = setting(30.0, "seconds for each host to answer; 0 skips the check")

    def __post_init__(self) -> None:
        super().__post_init__()
        slots = sum(host.slots for host in self.hosts)
        needed = len(self.shape.tasks)
        if slots < needed:
            raise LaunchError(
                f"the hosts have too few slots for {needed} tasks ({self.shape}); add hosts, or write host:N in "
                f"--hosts, host slots=N in --hostfile. Received: {slots} slot{'s' * (slots > 1)} on "
                f"{len(self.hosts)} host{'s' * (len(self.hosts) > 1)}"
            )
        if self.port > 65535 - max(host.slots for host in self.hosts):
            raise LaunchError(f"--port leaves no port for each slot; use a smaller number. Received: {self.port}")
        for option in self.ssh:
            if not option.startswith("-") or option == "--":
                raise LaunchError(f"--ssh is no option of ssh; write --ssh=-p2222. Received: {option!r}")
        words = [word for option in self.ssh for word in re.split(r"(?<=^-\w) +", option, maxsplit=1)]  # "-p 2222"
        object.__setattr__(self, "ssh", tuple(words))

    @property
    def places(self) -> dict[Task, tuple[Host, int]]:
        """Host of each task, and the index of its slot there."""
        free = [(host, slot) for host in self.hosts for slot in range(host.slots)]
        return dict(zip(self.shape.placed, free, strict=False))


def plan(job: SshJob, dropped: Collection[str] = ()) -> Request:
    """Returns the local process of each task that `run_tasks` would start.

    Args:
      job: the job.
      dropped: names of workers to leave out. The others are renumbered, and keep their hosts and ports.

    Raises:
      LaunchError: no worker is left.
    """
    places = job.places
    addresses = {task: f"{host.address}:{job.port + slot}" for task, (host, slot) in places.items()}
    visible = _visible_devices(job)
    left, whole = job.shape.without(dropped)
    left_addresses = [addresses[whole[member]] for member in left.members]
    tasks = []
    for task in left.tasks:
        env = {**left.environment("ssh", left_addresses, task), **job.env, **visible.get(whole[task], {})}
        login = places[whole[task]][0].login
        client = (sys.executable, "-P", "-m", "tfdist.launchers.ssh.client")
        far = (login, job.python, job.directory, job.setup)
        command = (*client, *far, *job.ssh, "--", *job.command)
        sent = {SENT_PREFIX + name: value for name, value in env.items()}
        probe = tuple(ssh_client.probe(login, job.ssh))
        tasks.append(TaskRequest(str(task), sent, command, login, probe))
    return dataclasses.replace(job.request(left, tasks), orphan_secs=ORPHAN_SECS)


def _visible_devices(job: SshJob) -> dict[Task, dict[str, str]]:
    if job.gpus_per_worker is None:
        return {}
    used, found, computing = dict[Host, int](), {}, set(job.shape.computing)
    for task, (host, _) in job.places.items():
        first = used.get(host, 0)
        count = job.gpus_per_worker if task in computing else 0
        found[task] = {VISIBLE: ",".join(map(str, range(first, first + count)))}
        used[host] = first + count
    return found


def preflight(job: SshJob) -> list[str]:
    """Checks all hosts at once, before any task starts; returns warnings, one line each.

    Raises:
      LaunchError: a host can't be used. The message has all problems of all hosts, in one line.
    """
    requests.find_tool("ssh", "install an OpenSSH client")
    asked: dict[str, dict[str, Any]] = {}
    files = [] if job.command[0] == "-m" else [job.command[0]]
    for task, (host, slot) in job.places.items():
        entry = asked.setdefault(host.login, {"directory": job.directory, "files": files, "ports": [], "gpus": 0})
        entry["ports"] += [job.port + slot] if task in job.shape.members else []
        entry["gpus"] += (job.gpus_per_worker or 0) * (task in job.shape.computing)
    with concurrent.futures.ThreadPoolExecutor(min(32, len(asked)), "tfdist preflight") as pool:
        commands = {login: ssh_client.command(login, job.python, job.ssh, job.setup, "--probe") for login in asked}
        found = pool.map(lambda login: _probe(login, commands[login], asked[login], job.preflight_secs), asked)
        answers = dict(zip(asked, found, strict=True))
    wrong, warnings, here = [], [], versions()
    for login, answer in answers.items():
        if isinstance(answer, str):
            wrong.append(f"{login} {answer}")
            continue
        wrong += [f"{login} {problem}" for problem in problems_of(answer, asked[login], here)]
        if abs(answer["skew"]) > _MAX_SKEW_SECS:
            warnings.append(f"the clock of {login} is {answer['skew']:+.0f} s off; set it (timedatectl, chrony)")
    if wrong:
        raise LaunchError("; ".join(wrong))
    return warnings


def define_flags(values: flags.FlagValues) -> None:
    """Defines this platform's flags."""
    shape.define_flags(values, Shape, SshJob, Restarts, LogSettings)
    values.set_default("num_workers", None)
    values["num_workers"].help += "; by default as many as the hosts have slots for"
    hostfile_help = 'file with lines such as "host slots=2"'
    command_line.define(values, {"hosts": ("", "hosts, such as a,user@b:2"), "hostfile": ("", hostfile_help)})


def job_from_flags(values: flags.FlagValues, command: Sequence[str]) -> SshJob:
    """Returns the job that the command line describes; raises a LaunchError if the job is invalid."""
    if bool(values.hosts) == bool(values.hostfile):
        received = "both" if values.hosts else "neither"
        raise LaunchError(f"say where to run by one of --hosts=a,b and --hostfile=FILE. Received: {received}")
    hosts = hosts_from_flag(values.hosts) if values.hosts else read_hostfile(values.hostfile)
    if values.num_workers is None:
        values.num_workers = 1
        others = len(command_line.from_settings(Shape, values).tasks) - 1
        values.num_workers = max(1, sum(host.slots for host in hosts) - others)
    directory = values.directory or str(pathlib.Path.cwd())
    return shape.job_from_flags(SshJob, values, command, hosts=tuple(hosts), directory=directory)


def _launch(values: flags.FlagValues, command: Sequence[str]) -> int:
    job = job_from_flags(values, command)
    logs = command_line.from_settings(LogSettings, values)
    request = plan(job)
    used = collections.Counter(host for host, _ in job.places.values())
    if unused := [f"{host.slots - used[host]} of {host.login}" for host in job.hosts if host.slots > used[host]]:
        _log.say(f"slots that no task takes: {', '.join(unused)}; leave --num_workers away to use all")

    def start() -> int:
        for warning in preflight(job) if job.preflight_secs else []:
            _log.say(warning)
        return local.submit_with_secret(functools.partial(plan, job), logs)

    return command_line.submit_or_show(values, request, start)


main = functools.partial(command_line.run_command, _USAGE, define_flags, run=_launch)


# Parser of the list of hosts: from a file with one line per host, or from the command line.

_MAX_SLOTS = 1024
_LOGIN = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9_.-]*@)?[A-Za-z0-9_][A-Za-z0-9_.:-]*", re.ASCII)
_EXAMPLE = 'write "host", "user@host slots=2" or "host slots=2 address=10.0.0.2"'


@dataclasses.dataclass(frozen=True)
class Host:
    """A machine that runs tasks.

    Args:
      login: destination for ssh, such as "user@host".
      slots: most tasks on this host.
      address: name or address at which the other tasks reach it; the host of `login` by default.
    """

    login: str
    slots: int = 1
    address: str = ""

    def __post_init__(self) -> None:
        if not self.address:
            object.__setattr__(self, "address", self.login.rpartition("@")[2])


def read_hostfile(path: str) -> list[Host]:
    """Reads a file with lines such as "host slots=N"; raises a LaunchError, with the number of an invalid line."""
    return parse_hosts(read_file("--hostfile", path), path)


def parse_hosts(text: str, name: str = "hostfile") -> list[Host]:
    """Parses the text of a file. See `read_hostfile`."""
    lines = [(line.partition("#")[0].split(), line) for line in text.split("\n")]
    entries = [(words, f"{name}, line {number}", line) for number, (words, line) in enumerate(lines, 1) if words]
    if not entries:
        raise LaunchError(f"{name} lists no host; {_EXAMPLE} on a line. Received: nothing")
    return _hosts(entries, _EXAMPLE)


def hosts_from_flag(text: str) -> list[Host]:
    """Parses "a,user@b:2": names, each with its slots if several; raises a LaunchError for an invalid entry."""
    names = [item.strip() for item in text.split(",")]
    counted = ",".join(f"{name}:{count}" if count > 1 else name for name, count in collections.Counter(names).items())
    example = counted if "" not in names and len({*names}) < len(names) else "a,user@b:2"
    return _hosts([([name], "--hosts", text) for name in names], f"write --hosts={example}")


def _hosts(entries: Sequence[tuple[list[str], str, str]], remedy: str) -> list[Host]:
    """Returns a host for each entry: its words, where it stands, and the text received."""
    found: dict[str, Host] = {}
    for words, where, received in entries:
        try:
            host = _host(*words)
            if host.address.lower() in found:
                raise ValueError("the host was named before; add its slots there")
        except ValueError as error:
            raise LaunchError(f"{where}: {error}; {remedy}. Received: {received!r}") from None
        found[host.address.lower()] = host
    return list(found.values())


def _host(login: str, *options: str) -> Host:
    if login.count(":") == 1:  # "a:2" is "a slots=2"; more colons are of an address.
        login, _, count = login.partition(":")
        options = (f"slots={count}", *options)
    if not _LOGIN.fullmatch(login):
        raise ValueError("the name of the host is invalid")
    found: dict[str, str] = {}
    for option in options:
        key, equals, value = option.partition("=")
        if key not in ("slots", "address") or not equals or not value or key in found:
            raise ValueError("the option of the host is invalid")
        found[key] = value
    slots = found.get("slots", "1")
    if not (slots.isascii() and slots.isdigit() and len(slots) < 6 and 1 <= int(slots) <= _MAX_SLOTS):
        raise ValueError(f"slots is no number from 1 to {_MAX_SLOTS}")
    host = Host(login, int(slots), found.get("address", ""))
    if wrong := _sockets.address_problem(f"{host.address}:1"):
        raise ValueError(f"the address {wrong[0]}")
    return host


# Checks all hosts before any task starts, so that causes of late failures and hangs are reported at once.

_MAX_SKEW_SECS = 5.0
_NO_PROGRAM = (126, 127)
_SSH_FAILED = 255
_PORT_ADVICE = {
    "in use": "has port {} in use; end what holds it, or use another --port",
    "privileged": "lets this user not listen on port {}, which is privileged; use a --port from 1024",
}
_OTHER_PORT = "can't listen on port {} ({}); use another --port"


def _probe(login: str, command: Sequence[str], asked: Mapping[str, Any], timeout_secs: float) -> dict[str, Any] | str:
    """Runs the preflight on a host; returns its answer, or the problem as the end of a sentence."""
    started = time.time()
    try:
        done = subprocess.run(
            command, input=json.dumps(dict(asked)).encode() + b"\n", capture_output=True, timeout=timeout_secs
        )
    except subprocess.TimeoutExpired:
        return f"did not answer within {timeout_secs:g} s; check that `ssh {login} true` works, or use --preflight_secs"
    said = (done.stderr.decode("utf-8", "replace").strip().splitlines() or ["it said nothing"])[-1][:200]
    if done.returncode == _SSH_FAILED:
        return f"can't be reached ({said}); check its name, and that `ssh {login} true` works without a password"
    try:
        answer = json.loads(done.stdout.decode().splitlines()[-1])
    except (ValueError, IndexError):
        if done.returncode in _NO_PROGRAM:
            return f"can't run that interpreter ({said}); name one with --python"
        if "No module named" in said:
            return f"has no tfdist for that interpreter ({said}); install it there, or name another with --python"
        return f"did not answer as expected ({said}); is there another version of tfdist, or does --setup fail?"
    answer["skew"] = answer["time"] - (started + time.time()) / 2
    # A difference within half of the round trip may come from unequal times of the two ways.
    answer["skew"] *= abs(answer["skew"]) > (time.time() - started) / 2
    return answer


def problems_of(answer: Mapping[str, Any], asked: Mapping[str, Any], here: Mapping[str, str]) -> list[str]:
    """Reasons why a host can't run its tasks, from its answer and from its tasks."""
    found = []
    for name, version in here.items():
        there = answer["versions"].get(name)
        if there != version:
            found.append(f"has {name} {there or 'missing'} where this machine has {version}; install the same")
    found += [f"lacks {path}; copy or mount it there, or use --directory" for path in answer["missing"]]
    found += [_PORT_ADVICE.get(problem, _OTHER_PORT).format(port, problem) for port, problem in answer["taken"].items()]
    if answer["gpus"] < asked["gpus"]:
        found.append(f"has {answer['gpus']} of {asked['gpus']} GPUs; use fewer --gpus_per_worker or slots")
    return found
