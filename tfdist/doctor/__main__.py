# SPDX-License-Identifier: Apache-2.0
"""Command `tfdist doctor`: checks this machine, and the cluster in TF_CONFIG, for causes of late failures and hangs.

It imports no TensorFlow. If it runs as all tasks of a cluster at once (`tfdist launch ... -m tfdist.doctor --measure`),
the tasks connect to each other, and measure their links.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import errno
import functools
import ipaddress
import json
import os
import pathlib
import platform
import re
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata

from absl import flags

import tfdist
from tfdist import _log, _sockets
from tfdist.cluster import Cluster, ClusterError, note_joined
from tfdist.doctor import measure as doctor_measure
from tfdist.launchers import command_line, environment
from tfdist.launchers.requests import LaunchError

_USAGE = """\
usage: tfdist doctor [FLAGS]

Looks at this machine, and at the cluster in the variable TF_CONFIG if it is set: versions, GPUs, names, ports, whether
the other tasks can be reached. Returns 0 if nothing is wrong, else 1.

  tfdist doctor                                                    this machine
  tfdist launch ssh --hosts=a,b -m tfdist.doctor                   all machines of a cluster
  tfdist launch ssh --hosts=a,b -m tfdist.doctor --measure         bandwidth and latency between all machines
  tfdist doctor --firewall_rules                                   prints rules that let only the job's hosts in
"""
OK, WARNING, WRONG = "ok", "warning", "wrong"
_MEND_NAME = "mend DNS, or use its IP address in TF_CONFIG"
# Requirements of setup.py.
_NEEDED = {
    "Python": ">=3.11,<3.14",
    "tensorflow": ">=2.20,<2.22",
    "keras": ">=3.15,<3.17",
    "numpy": ">=1.26",
    "absl-py": ">=2.1",
}


@dataclasses.dataclass(frozen=True)
class Finding:
    """Result of one check: its state (`OK`, `WARNING` or `WRONG`), and one line with the finding and the remedy."""

    state: str
    text: str

    def __str__(self) -> str:
        return f"{self.state:8}{self.text}"


def _run(values: flags.FlagValues, _: Sequence[str]) -> int:
    """Returns the exit code: 1 if something is wrong, 0 also with warnings."""
    for name in ("measure_secs", "json") if not values.measure else ():
        if values[name].present:
            raise LaunchError(f"--{name} is for --measure; give both. Received: --{name}={values[name].value}")
    for name in ("measure", "firewall_rules") if "TF_CONFIG" not in os.environ else ():
        if values[name].value:
            command = f"tfdist launch ssh --hosts=a,b -m tfdist.doctor --{name}"
            raise LaunchError(f"--{name} is for the tasks of a cluster; run {command}. Received: no TF_CONFIG")
    if values.firewall_rules:
        try:
            sys.stdout.write(rules(Cluster.from_tf_config(os.environ["TF_CONFIG"]), os.getuid()))
        except ValueError as error:
            _log.say(str(error))
            return 1
        return 0
    if values.measure:
        return doctor_measure.measure_as_task(os.environ, values.measure_secs, values.json)
    found = examine(values.timeout_secs)
    states = [finding.state for finding in found]
    wrong = states.count(WRONG)
    summary = "nothing is wrong, but see the warnings" if WARNING in states else "all is well"
    if wrong:
        summary = "1 thing is wrong" if wrong == 1 else f"{wrong} things are wrong"
    sys.stdout.write("".join(f"{line}\n" for line in (*found, summary)))
    sys.stdout.flush()
    return 1 if wrong else 0


def define_flags(values: flags.FlagValues) -> None:
    """Defines the flags of `tfdist doctor`."""
    number = functools.partial(flags.DEFINE_float, lower_bound=0.1, flag_values=values)
    number("timeout_secs", 5.0, "seconds for another task to answer")
    number("measure_secs", 120.0, "longest time of --measure for all links together")
    table = {
        "measure": (False, "measure the links between the tasks, which run this too"),
        "json": ("", "file for the links, which the first task writes for tfdist advise"),
        "firewall_rules": (False, "print rules for nft that let only the job's hosts in"),
    }
    command_line.define(values, table)


main = functools.partial(command_line.run_command, _USAGE, define_flags, run=_run, takes="")


def examine(timeout_secs: float, env: Mapping[str, str] = os.environ) -> list[Finding]:
    """Runs all checks; another task may take `timeout_secs` to answer."""
    found = [*versions(_installed), *keras_backend(env), *gpu_findings(env, _installed)]
    if "TF_CONFIG" not in env:
        return [*found, Finding(OK, "TF_CONFIG is not set: this machine trains alone")]
    try:
        cluster = Cluster.from_tf_config(env["TF_CONFIG"])
        # The launcher would miss a strategy.
        note_joined()
    except ClusterError as error:
        return [*found, Finding(WRONG, str(error))]
    return [*found, *strategy(cluster), *own_port(cluster), *reachable(cluster, timeout_secs)]


# This machine.


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def versions(installed: Callable[[str], str | None]) -> list[Finding]:
    """Checks the versions of Python, and of needed packages by `installed`, which returns None for a missing one."""
    found = [Finding(OK, f"tfdist {tfdist.__version__}")]
    tpu = installed("tensorflow-tpu")
    for name, needed in _NEEDED.items():
        version, remedy = installed(name), f"pip install '{name}{needed}'"
        if name == "Python":
            version, remedy = platform.python_version(), f"use one {needed}"
        elif name == "tensorflow" and tpu:
            if version:
                both = f"tensorflow {version} and tensorflow-tpu {tpu}"
                found.append(Finding(WRONG, f"{both} overwrite each other; uninstall both, install one"))
                continue
            name, version, remedy = "tensorflow-tpu", tpu, f"pip install 'tensorflow-tpu{needed}'"
        lowest, _, below = needed.partition("<")
        if version is None:
            found.append(Finding(WRONG, f"{name} is not installed; {remedy}"))
        elif _parts(version) < _parts(lowest) or (below and _parts(version) >= _parts(below)):
            found.append(Finding(WRONG, f"{name} {version} is not supported; {remedy}"))
        else:
            found.append(Finding(OK, f"{name} {version}"))
    mpi = installed("mpi4py")
    use = "CPUs of several workers sum by MPI" if mpi else "pip install '.[mpi]' in a checkout sums faster on CPUs"
    found.append(Finding(OK, f"mpi4py {mpi or 'is not installed'}: {use}"))
    return found


def _parts(version: str) -> tuple[int, ...]:
    return tuple(int(number[:9]) for number in re.findall(r"[0-9]+", version)[:2])


def keras_backend(env: Mapping[str, str]) -> list[Finding]:
    """Checks that Keras will choose the TensorFlow backend."""
    where, backend = "KERAS_BACKEND", env.get("KERAS_BACKEND")
    if not backend:
        home = pathlib.Path(env.get("KERAS_HOME") or pathlib.Path(env.get("HOME", "~")).expanduser() / ".keras")
        where = str(home / "keras.json")
        try:
            backend = json.loads((home / "keras.json").read_text(encoding="utf-8")).get("backend")
        except (OSError, ValueError, AttributeError):
            backend = None
    if backend in (None, "tensorflow"):
        return [Finding(OK, "Keras uses TensorFlow")]
    return [Finding(WRONG, f"{where} has Keras use {backend}; set KERAS_BACKEND=tensorflow")]


def gpu_findings(env: Mapping[str, str], installed: Callable[[str], str | None]) -> list[Finding]:
    """Checks that TensorFlow may use this machine's GPUs, and that CUDA libraries are installed."""
    try:
        there, usable = environment.present({}), environment.present(env)
    except LaunchError as error:
        return [Finding(WRONG, str(error))]
    if not there:
        return [Finding(OK, "no GPU: training uses the CPU")]
    if not usable:
        given = f"{environment.VISIBLE}={env.get(environment.VISIBLE)!r}"
        return [Finding(WARNING, f"{given} hides all {len(there)} GPUs; unset it to use them")]
    if not any(installed(f"nvidia-cudnn-cu{version}") for version in (12, 13)):
        text = f"{len(usable)} GPUs, and no CUDA libraries from pip; if TensorFlow sees no GPU, pip install"
        return [Finding(WARNING, f"{text} '.[gpu]' in a checkout")]
    return [Finding(OK, f"{len(usable)} of {len(there)} GPUs may be used")]


# The cluster.


def strategy(cluster: Cluster) -> list[Finding]:
    """Checks that the matching strategy accepts this cluster."""
    try:
        if cluster.num_ps:
            cluster.check_parameter_server()
        elif cluster.task.type != "evaluator":
            cluster.check_multi_worker()
    except ClusterError as error:
        return [Finding(WRONG, f"TF_CONFIG: {error}")]
    kind = "ParameterServerStrategy" if cluster.num_ps else "MultiWorkerMirroredStrategy"
    return [Finding(OK, f"TF_CONFIG: this is {cluster.task} of {len(cluster.tasks)} tasks, for {kind}")]


def own_port(cluster: Cluster) -> list[Finding]:
    """Checks that this task can listen at its own address."""
    if cluster.task not in cluster.tasks:
        return []
    host, port = _sockets.split_address(cluster.address())
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except (socket.gaierror, UnicodeError) as error:
        return [Finding(WRONG, f"the host {host} of {cluster.task} can't be resolved ({error}); {_MEND_NAME}")]
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            # Only a warning: behind NAT this is normal, because TensorFlow listens on all interfaces.
            text = f"{host}, the address of {cluster.task}, is none of this machine; is this the right task?"
            return [Finding(WARNING, text)]
        text = f"port {port} of {cluster.task} can't be listened on ({error}); end what holds it, or use another"
        return [Finding(WRONG, text)]
    return [Finding(OK, f"port {port} is free")]


def reachable(cluster: Cluster, timeout_secs: float) -> list[Finding]:
    """Checks that the hosts of the other tasks have known names, and answer. Servers need not be running yet."""
    others = [task for task in cluster.tasks if task != cluster.task]
    pool = concurrent.futures.ThreadPoolExecutor(min(32, len(others) or 1), "tfdist reach")
    futures = {task: pool.submit(_sockets.connection_error, cluster.address(task), timeout_secs) for task in others}
    found = []
    for task, future in futures.items():
        try:
            # Resolving a name has no timeout of its own.
            error = future.result(2 * timeout_secs)
        except TimeoutError as late:
            error = late
        if error is None or isinstance(error, ConnectionRefusedError):
            state, text = OK, "the machine answers, nothing listens yet" if error else "something listens"
        elif isinstance(error, socket.gaierror | UnicodeError):
            state, text = WRONG, f"the name can't be resolved ({error}); {_MEND_NAME}"
        else:
            why = f"no answer in {timeout_secs:g} s" if isinstance(error, TimeoutError) else str(error)
            state, text = WRONG, f"{why}; check that the machine is up, and that no firewall is between"
        found.append(Finding(state, f"{task} at {cluster.address(task)}: {text}"))
    pool.shutdown(wait=False, cancel_futures=True)
    return found


# Rules for Linux' firewall (nftables) that admit only a job's hosts and its user to its ports. No TensorFlow import.
#
# TensorFlow's servers listen on all interfaces and authenticate no peer. So on a shared network only a firewall keeps
# other hosts out. `rules` returns text for `nft -f`, to be loaded by root.


def rules(cluster: Cluster, user: int) -> str:
    """Returns the rules for the machine of `cluster.task`.

    Args:
      cluster: all tasks of the job.
      user: id of the user that runs the tasks.

    Returns:
      A script for `nft -f`. Loading it again replaces its earlier rules for the same ports.

    Raises:
      ValueError: a host's name can't be resolved.
    """
    tasks = [cluster.address(task) for task in cluster.tasks]
    here = _sockets.address_key(cluster.address())[0]
    ports = sorted({port for host, port in map(_sockets.address_key, tasks) if host == here})
    hosts = {address for each in tasks for address in _addresses(_sockets.split_address(each)[0])}
    to_ports = f"tcp dport {{ {', '.join(map(str, ports))} }} {_OPENING}"
    allowed = []
    for name, version in (("ip", 4), ("ip6", 6)):
        if of_version := sorted(str(host) for host in hosts if host.version == version):
            allowed.append(f"    {name} saddr {{ {', '.join(of_version)} }} {to_ports} accept")
    return _SCRIPT.format(
        task=cluster.task, table=f"tfdist_{ports[0]}", user=user, to_ports=to_ports, allowed="\n".join(allowed)
    )


def _addresses(host: str) -> set[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        why = f"the host {host} can't be resolved here, so no rule can let it in"
        raise ValueError(f"{why}; {_MEND_NAME}") from None
    return {ipaddress.ip_address(str(address[0]).partition("%")[0]) for *_, address in found}


# Matches the first packet of a connection; later packets may be answers to a program that uses such a port by chance.
_OPENING = "tcp flags & (syn | ack) == syn"
# Deleting an absent table is an error, so the script creates it first. A packet must pass the rules of all tables.
_SCRIPT = """\
# Only the hosts of this job, and on this machine only user {user} and root, reach the ports of its tasks here.
# For the machine of {task}. Load it as root with nft -f FILE; remove it with: nft delete table inet {table}
table inet {table}
delete table inet {table}
table inet {table} {{
  chain from_other_machines {{
    type filter hook input priority -10; policy accept;
    iif lo accept
{allowed}
    {to_ports} reject with tcp reset
  }}
  chain from_this_machine {{
    type filter hook output priority -10; policy accept;
    oif lo {to_ports} meta skuid != {{ 0, {user} }} reject with tcp reset
  }}
}}
"""


if __name__ == "__main__":
    from tfdist import cli

    sys.exit(cli.main(["doctor", *sys.argv[1:]]))
