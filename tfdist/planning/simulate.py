# SPDX-License-Identifier: Apache-2.0
"""Command `tfdist simulate`: simulates training on a cluster that flags describe."""

from __future__ import annotations

import functools
import json
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from absl import flags

import tfdist.flags
from tfdist import _files, _log
from tfdist.launchers import command_line
from tfdist.launchers.requests import LaunchError
from tfdist.planning.simulation import engines, simulate
from tfdist.planning.simulation.delay_distributions import BUILDERS
from tfdist.planning.simulation.models import ClusterModel, CodecModel, ModelProfile, NetworkModel, SparseTable
from tfdist.planning.simulation.result import Result

_USAGE = """\
usage: tfdist simulate [FLAGS]

Simulates training with the real policies on a model of a cluster, and prints throughput, efficiency, waits, drops, use
of the links, and what limits the throughput. It imports no TensorFlow.

  tfdist simulate --workers=8 --compute='lognormal(mean=0.2, s=1.0)' --policies='BackupWorkers(spares=2)'
  tfdist simulate --workers=16 --servers=2 --step_secs=120ms --dense_bytes=100MB --bandwidth=10Gbit --latency_secs=50us

tfdist.simulation describes clusters of unequal workers, and with failures at known times, in Python.
"""
# Flags that have no effect under the other strategies.
_ONLY_FOR = {
    ("servers", "server_bandwidth", "queueing"): ("parameter_server",),
    ("overlap",): ("mirrored", "multi_worker"),
    ("workers_per_machine", "bandwidth", "latency_secs"): ("parameter_server", "multi_worker"),
}
# Flags by the part of the configuration that they set: type and help. Values with a unit stay text.
_Flags = dict[str, tuple[type, str]]
_LEAST = {"servers": 0, "steps_per_epoch": 0, "seed": None}  # 1 of other integers.
_CLUSTER: _Flags = {
    "workers": (int, "worker processes"),
    "servers": (int, "parameter servers"),
    "devices_per_worker": (int, "devices of each worker"),
    "workers_per_machine": (int, "workers that share a machine's link"),
    "compute": (str, "distribution of the seconds of a step, such as 'lognormal(mean=0.2, s=1.0)'"),
}
_NETWORK: _Flags = {
    "bandwidth": (str, "of each machine's link, such as 10Gbit"),
    "latency_secs": (str, "of a message between machines, such as 50us"),
    "within_bandwidth": (str, "between devices of a machine, such as 12GB/s"),
    "within_latency_secs": (str, "of a message within a machine"),
    "server_bandwidth": (str, "of each parameter server's link; that of the machines by default"),
    "queueing": (str, "order of transfers on a link: fair or fifo"),
}
_MODEL: _Flags = {
    "dense_bytes": (str, "bytes of the dense variables, such as 100MB"),
    "batch_size": (int, "examples in the batch of one device"),
    "step_secs": (str, "seconds of a step on one device, such as 120ms"),
    "update_secs": (str, "seconds of an update, communication not included"),
    "optimizer_bytes": (str, "bytes of the optimizer's slots"),
    "overlap": (float, "share of a step during which an all-reduce can already run"),
}
_RUN: _Flags = {
    "num_updates": (int, "updates to simulate (100)"),
    "steps_per_epoch": (
        int,
        "updates of an epoch: for Warmup(epochs=...), and where asynchronous training waits at its end",
    ),
    "seed": (int, "seed of the random draws (0)"),
}


def _run(values: flags.FlagValues, _: Sequence[str]) -> int:
    if values.json:
        _files.check_writable(values.json, "--json")
    try:
        _check_used(values)
        result = _simulate(values)
    except (ValueError, RuntimeError) as error:
        raise LaunchError(_with_flags(str(error), values)) from None
    if values.strategy in ("parameter_server", engines.PARAMETER_SERVER) and values.servers is None:
        _log.say("simulated is ParameterServerStrategy with one parameter server; --servers and --strategy change it")
    sys.stdout.write(f"{result}\n")
    if values.json:
        _files.write(values.json, json.dumps(result.to_dict(), indent=2) + "\n")
    return 0


def _check_used(values: flags.FlagValues) -> None:
    """Raises ValueError for a flag that would be ignored."""
    strategy = next((short for short, name in engines.SHORT_NAMES.items() if values.strategy == name), values.strategy)
    for names, strategies in _ONLY_FOR.items():
        for name in names:
            if getattr(values, name) is not None and strategy not in strategies:
                raise ValueError(
                    f"--{name} has no effect here; leave it out, or use --strategy={' or '.join(strategies)}. "
                    f"Received: --{name}={getattr(values, name)}, --strategy={values.strategy}"
                )
    if values.compute is not None and values.step_secs is not None:
        raise ValueError(
            "--compute is the time of a step already; leave --step_secs out. "
            f"Received: --compute={values.compute}, --step_secs={values.step_secs}"
        )


def _with_flags(text: str, values: flags.FlagValues) -> str:
    """Returns an error's text with flags for arguments of classes: --workers for ClusterModel(workers=...)."""

    def flag(found: re.Match[str]) -> str:
        return command_line.shell_flag(found[1], found[2].strip('".')) if found[1] in values else found[0]

    return re.sub(r'(?:\w*Model\w*|simulate)\((\w+)=(\.\.\.|[\w.]+|"\w+"|\w+\([\w=.]+\))\)', flag, text)


def define_flags(values: flags.FlagValues) -> None:
    """Defines the flags of `tfdist simulate`."""
    text = functools.partial(flags.DEFINE_string, flag_values=values)
    text("json", None, "write the result to this file, too")
    strategies = [*engines.SHORT_NAMES, *engines.STRATEGIES]
    flags.DEFINE_enum("strategy", "parameter_server", strategies, "which strategy", flag_values=values)
    flags.DEFINE_multi_string(
        "policies", [], "a policy, such as 'SoftSync(updates=4)'; once for each", flag_values=values
    )
    flags.DEFINE_multi_string(
        "sparse_table", [], "rows that a step touches, x, bytes of a row, such as 2000x256B", flag_values=values
    )
    text("codec", None, "cost of the codec of Compression, such as 'CodecModel(ratio=0.5)'")
    for name, (kind, meaning) in (_CLUSTER | _NETWORK | _MODEL | _RUN).items():
        least = {"lower_bound": _LEAST.get(name, 1)} if kind is int else {}
        command_line.DEFINE[kind](name, None, meaning, flag_values=values, **least)


main = functools.partial(command_line.run_command, _USAGE, define_flags, run=_run, takes="")


def _simulate(values: flags.FlagValues) -> Result:
    def given(names: Iterable[str]) -> dict[str, Any]:
        return {name: getattr(values, name) for name in names if getattr(values, name) is not None}

    cluster = given(_CLUSTER)
    if "compute" in cluster:
        example = "lognormal(mean=0.2, s=1.0)"
        cluster["compute"] = tfdist.flags.build(cluster["compute"], "--compute", "distribution", BUILDERS, example)
    tables = [_table(each) for each in values.sparse_table]
    known, example = {"CodecModel": CodecModel}, "CodecModel(ratio=0.5)"
    codec = tfdist.flags.build(values.codec, "--codec", "codec", known, example) if values.codec else None
    network = NetworkModel(**given(_NETWORK))
    links = given(name for name in _NETWORK if name.endswith("bandwidth"))
    if links and values.dense_bytes is None and not tables:
        name = next(iter(links))
        raise ValueError(
            f"--{name} has no effect without bytes to send; add --dense_bytes=100MB. Received: --{name}={links[name]}"
        )
    return simulate(
        ClusterModel(**cluster, network=network),
        ModelProfile(**given(_MODEL), sparse_tables=tables),
        strategy=values.strategy,
        policies=[tfdist.flags.parse_policy(each, "--policies") for each in values.policies],
        codec=codec,
        **given(_RUN),
    )


def _table(text: str) -> SparseTable:
    rows, cross, row_bytes = text.partition("x")
    try:
        return SparseTable(float(rows), row_bytes if cross else "")
    except ValueError:
        raise ValueError(f"--sparse_table: write it like 2000x256B. Received: {text!r}") from None
