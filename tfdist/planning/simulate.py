# SPDX-License-Identifier: Apache-2.0
"""Command `tfdist simulate`: simulates training on a cluster that flags, or a YAML file, describe."""

from __future__ import annotations

import ast
import bisect
import dataclasses
import functools
import json
import pathlib
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import yaml
from absl import flags

import tfdist.flags
from tfdist import _files
from tfdist.launchers import command_line
from tfdist.launchers.requests import LaunchError
from tfdist.planning.simulation import delay_distributions, engines, result, simulate
from tfdist.planning.simulation.delay_distributions import DelayDistribution
from tfdist.planning.simulation.models import ClusterModel, CodecModel, Failure, ModelProfile, NetworkModel, SparseTable
from tfdist.planning.simulation.result import Result, Simulation

# Models of the simulator from plain data, as in a YAML or JSON file, with errors that name the key.


_MAX_TEXT = 10_000


def cluster_from_dict(data: Any) -> ClusterModel:
    """Builds a `ClusterModel` from its fields, with "network" and "failures" as mappings of theirs.

    Raises:
      ValueError: a key is unknown, or a value is invalid.
    """
    given = _checked(data, ClusterModel, "cluster")
    if given.get("compute") is not None:
        given["compute"] = distribution(given["compute"], "cluster.compute")
    if "network" in given:
        given["network"] = NetworkModel(**_checked(given["network"], NetworkModel, "cluster.network"))
    if "delays" in given:
        delays = _mapping(given["delays"], "cluster.delays")
        given["delays"] = {worker: distribution(each, f"cluster.delays.{worker}") for worker, each in delays.items()}
    if "speeds" in given:
        given["speeds"] = dict(_mapping(given["speeds"], "cluster.speeds"))
    if "failures" in given:
        failures = _list(given["failures"], "cluster.failures")
        given["failures"] = tuple(Failure(**_checked(each, Failure, "cluster.failures")) for each in failures)
    if given.get("server_shares") is not None:
        given["server_shares"] = tuple(_list(given["server_shares"], "cluster.server_shares"))
    return ClusterModel(**given)


def model_from_dict(data: Any) -> ModelProfile:
    """Builds a `ModelProfile` from its fields, with "sparse_tables" as a list of mappings.

    Raises:
      ValueError: a key is unknown, or a value is invalid.
    """
    given = _checked(data, ModelProfile, "model")
    if "sparse_tables" in given:
        tables = _list(given["sparse_tables"], "model.sparse_tables")
        given["sparse_tables"] = tuple(
            SparseTable(**_checked(each, SparseTable, "model.sparse_tables")) for each in tables
        )
    return ModelProfile(**given)


def codec_from_dict(data: Any) -> CodecModel | None:
    """Builds a `CodecModel` from its fields; None from None.

    Raises:
      ValueError: a key is unknown, or a value is invalid.
    """
    return None if data is None else CodecModel(**_checked(data, CodecModel, "codec"))


def distribution(data: Any, name: str) -> DelayDistribution:
    """Builds a distribution from text such as "lognormal(mean=0.2, s=1.0)", a mapping, or a list of durations.

    Args:
      data: {"distribution": "lognormal", "mean": 0.2, "s": 1.0}, equivalent text, or measured durations.
      name: name of the value in messages.

    Raises:
      ValueError: it is no distribution.
    """
    try:
        if isinstance(data, list | tuple):
            return delay_distributions.empirical(data)
        return DelayDistribution.from_dict(_call(data) if isinstance(data, str) else data)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: {error}") from None


def _call(text: str) -> dict[str, Any]:
    """Parses "lognormal(mean=0.2, s=1)" into the mapping; no code is evaluated."""
    try:
        if len(text) > _MAX_TEXT:
            raise ValueError("too long")
        call = ast.parse(text.strip(), mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
            raise ValueError("no call")
        return {"distribution": call.func.id} | {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        raise ValueError(
            f"write a distribution with its parameters, like lognormal(mean=0.2, s=1.0). Received: {text[:100]!r}"
        ) from None


def _checked(data: Any, kind: type, name: str) -> dict[str, Any]:
    """Returns the mapping as keyword arguments of a dataclass."""
    given, fields = dict(_mapping(data, name)), [field.name for field in dataclasses.fields(kind)]
    for key in given:
        if key not in fields:
            raise ValueError(f"{name} has no key {key!r}; use {', '.join(fields)}")
    required = [field.name for field in dataclasses.fields(kind) if _is_required(field)]
    if missing := [key for key in required if key not in given]:
        raise ValueError(f"{name} needs {', '.join(missing)}; add what is missing. Received: {given!r}")
    return given


def _is_required(field: dataclasses.Field) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _mapping(data: Any, name: str) -> Mapping[Any, Any]:
    if not isinstance(data, Mapping):
        raise ValueError(f"{name} must be a mapping of keys to values. Received: {data!r}")
    return data


def _list(data: Any, name: str) -> list[Any]:
    if not isinstance(data, list | tuple):
        raise ValueError(f"{name} must be a list. Received: {data!r}")
    return list(data)


# Rows of an update log (docs/update_log.md) from a simulation, so that viewers show simulated and real runs alike.


_OUTCOMES = {result.ACCEPTED: 0, result.DROPPED: 1, result.LOST: 2}


def update_rows(simulation: Simulation, examples_per_gradient: int = 0) -> list[tuple[Any, ...]]:
    """Returns a tuple for each update, with the fields of `tfdist.telemetry.update_log.UpdateRecord` in their order.

    Gradients that were dropped or lost are in the next update. Those in flight at the end are left out.
    """
    contributions: list[list[tuple[Any, ...]]] = [[] for _ in simulation.updates]
    records, updates, times = simulation.gradients, simulation.updates, simulation.times
    weights = [dict(zip(update.staleness, update.weights, strict=True)) for update in updates]
    idle_since: dict[int, float] = {}
    for replica, started, arrived, outcome, staleness, update in zip(
        records.replica,
        records.started,
        records.arrived,
        records.outcome,
        records.staleness,
        records.update,
        strict=True,
    ):
        held = started - idle_since.get(replica, started)
        idle_since[replica] = arrived
        if outcome == result.IN_FLIGHT:
            continue
        index = update - 1 if update > 0 else bisect.bisect_left(times, arrived)
        if index < len(updates):
            weight = weights[index][staleness] if update > 0 else 0.0
            row = (replica, started, arrived, _OUTCOMES[outcome], max(0, staleness), weight, max(0.0, held))
            contributions[index].append(row)
    return [
        (
            update.step,
            times[index],
            times[index] - simulation.opened[index],
            update.wait_secs,
            len(update.contributors) * examples_per_gradient,
            int(simulation.taking_part[index] < simulation.replicas),
            contributions[index],
        )
        for index, update in enumerate(updates)
    ]


_USAGE = """\
usage: tfdist simulate [FLAGS]

Simulates training with the real policies on a model of a cluster, and prints throughput, efficiency, waits, drops, use
of the links, and what limits the throughput. It imports no TensorFlow.

  tfdist simulate --workers=8 --compute='lognormal(mean=0.2, s=1.0)' --policies='BackupWorkers(spares=2)'
  tfdist simulate --workers=16 --servers=2 --step_secs=120ms --dense_bytes=100MB --bandwidth=10Gbit --latency_secs=50us
  tfdist simulate --file=cluster.yaml --workers=32 --json=result.json

A file has the keys cluster (with network, failures), model (with sparse_tables), codec, strategy, policies,
num_updates, steps_per_epoch and seed, with the fields of the classes of tfdist.simulation. Flags override the file.

flags:
"""
_STRATEGIES = {
    "mirrored": engines.MIRRORED,
    "multi_worker": engines.MULTI_WORKER,
    "parameter_server": engines.PARAMETER_SERVER,
}
# The writer keeps two million gradients in memory at most.
_FLUSH_GRADIENTS = 500_000
# Flags by the part of the configuration that they set. Values with a unit stay text.
_CLUSTER = {
    "workers": int,
    "servers": int,
    "devices_per_worker": int,
    "workers_per_machine": int,
    "compute": str,
    "mean_secs_between_failures": str,
    "mean_secs_down": str,
}
_NETWORK = {
    "bandwidth": str,
    "latency_secs": str,
    "within_bandwidth": str,
    "within_latency_secs": str,
    "server_bandwidth": str,
    "shared_bandwidth": str,
    "queueing": str,
}
_MODEL = {
    "dense_bytes": str,
    "batch_size": int,
    "step_secs": str,
    "update_secs": str,
    "optimizer_bytes": str,
    "overlap": float,
}
_RUN = {"num_updates": int, "steps_per_epoch": int, "seed": int}
_HELP = {
    "workers": "worker processes",
    "servers": "parameter servers",
    "devices_per_worker": "devices of each worker",
    "workers_per_machine": "workers that share a machine's link",
    "compute": "distribution of the seconds of a step, such as 'lognormal(mean=0.2, s=1.0)'",
    "mean_secs_between_failures": "of each worker, such as 10h",
    "mean_secs_down": "until a lost worker is back, such as 5min",
    "bandwidth": "of each machine's link, such as 10Gbit",
    "latency_secs": "of a message between machines, such as 50us",
    "within_bandwidth": "between devices of a machine, such as 12GB/s",
    "within_latency_secs": "of a message within a machine",
    "server_bandwidth": "of each parameter server's link; that of the machines by default",
    "shared_bandwidth": "of a medium that all traffic between machines crosses",
    "queueing": "order of transfers on a link: fair or fifo",
    "dense_bytes": "bytes of the dense variables, such as 100MB",
    "batch_size": "examples in the batch of one device",
    "step_secs": "seconds of a step on one device, such as 120ms",
    "update_secs": "seconds of an update, communication not included",
    "optimizer_bytes": "bytes of the optimizer's slots",
    "overlap": "share of a step during which an all-reduce can already run",
    "num_updates": "updates to simulate (100)",
    "steps_per_epoch": "updates of an epoch: for Warmup(epochs=...), and where asynchronous training waits at its end",
    "seed": "seed of the random draws (0)",
}


def main(arguments: Sequence[str]) -> int:
    """Runs `tfdist simulate`.

    Args:
      arguments: the command line after the command's name.

    Returns:
      0.

    Raises:
      FlagError: a flag is unknown or its value can't be parsed.
      LaunchError: a value is invalid, or an argument is no flag.
      OSError: a file can't be read or written.
    """
    values, rest = command_line.parse(define_flags, arguments)
    if values.help:
        sys.stdout.write(_USAGE + command_line.describe(values))
        return 0
    if rest:
        raise LaunchError(f"tfdist simulate takes flags only; see tfdist simulate --help. Received: {rest[0]!r}")
    try:
        result = _simulate(_merged(_read(values.file) if values.file else {}, _from_flags(values)))
    except (ValueError, RuntimeError) as error:
        raise LaunchError(str(error)) from None
    sys.stdout.write(f"{result}\n")
    if values.json:
        pathlib.Path(values.json).parent.mkdir(parents=True, exist_ok=True)
        _files.write(values.json, json.dumps(result.to_dict(), indent=2) + "\n")
    if values.log_dir:
        sys.stdout.write(f"update log: {write_log(result, values.log_dir)}\n")
    return 0


def write_log(result: Result, log_dir: str) -> str:
    """Writes the update log of a simulation (docs/update_log.md) to a run directory; returns the log's directory.

    Raises:
      OSError: the log can't be written.
    """
    # NumPy is imported only where it is used.
    from tfdist.telemetry import update_log

    kind = "device" if result.strategy == engines.MIRRORED else "worker"
    header = update_log.Header(
        # Each simulation is a job of its own, also beside others in one directory.
        job=f"simulation-{uuid.uuid4().hex[:12]}",
        writer="simulator",
        workers=tuple(f"{kind}:{replica}" for replica in range(result.replicas)),
        strategy=result.strategy,
        policies=result.policies,
        simulated=True,
    )
    problems: list[str] = []
    pending = 0
    writer = update_log.LogWriter(str(pathlib.Path(log_dir) / "updates"), header, warn=problems.append)
    for row in update_rows(result, result.examples_per_gradient):
        writer.add(update_log.UpdateRecord(*row))
        pending += len(row[-1])
        if pending > _FLUSH_GRADIENTS:
            writer.flush()
            pending = 0
    for time, replica, is_back in result.losses:
        lost_or_back = update_log.EventKind.RETURNED if is_back else update_log.EventKind.LOST
        writer.event(lost_or_back, worker=replica, time=time)
    for time, update in zip(result.times, result.updates, strict=True):
        for change in update.changes:
            writer.event(update_log.EventKind.POLICY_CHANGED, change.text, time=time)
    writer.close()
    if problems:
        raise OSError(problems[0])
    return writer.directory


def define_flags(values: flags.FlagValues) -> None:
    """Defines the flags of `tfdist simulate`."""
    text = functools.partial(flags.DEFINE_string, flag_values=values)
    text("file", None, "YAML file with the settings; flags override it")
    text("json", None, "write the result to this file, too")
    text("log_dir", None, "write the update log to this run directory, for the TensorBoard page")
    strategies = list(_STRATEGIES)
    flags.DEFINE_enum("strategy", None, strategies, "which strategy (parameter_server)", flag_values=values)
    flags.DEFINE_multi_string(
        "policies", [], "a policy, such as 'SoftSync(updates=4)'; once for each", flag_values=values
    )
    flags.DEFINE_multi_string(
        "sparse_table", [], "rows that a step touches, x, bytes of a row, such as 2000x256B", flag_values=values
    )
    text("codec", None, "codec of Compression, as a YAML mapping, such as '{ratio: 0.5, commutes_with_sum: true}'")
    define: dict[Callable[[str], Any], Callable[..., Any]] = {
        int: flags.DEFINE_integer,
        float: flags.DEFINE_float,
        str: flags.DEFINE_string,
    }
    for name, kind in (*_CLUSTER.items(), *_NETWORK.items(), *_MODEL.items(), *_RUN.items()):
        define[kind](name, None, _HELP[name], flag_values=values)


def _from_flags(values: flags.FlagValues) -> dict[str, Any]:
    """Returns the flags that were given, in the form of the file."""

    def given(names: Mapping[str, Any]) -> dict[str, Any]:
        return {name: getattr(values, name) for name in names if getattr(values, name) is not None}

    data: dict[str, Any] = {"cluster": given(_CLUSTER), "model": given(_MODEL), **given(_RUN)}
    if network := given(_NETWORK):
        data["cluster"]["network"] = network
    if values.sparse_table:
        data["model"]["sparse_tables"] = [_table(each) for each in values.sparse_table]
    if values.codec is not None:
        data["codec"] = _parsed(values.codec, "--codec")
    if values.strategy is not None:
        data["strategy"] = _STRATEGIES[values.strategy]
    if values.policies:
        data["policies"] = values.policies
    return data


def _table(text: str) -> dict[str, Any]:
    rows, cross, row_bytes = text.partition("x")
    try:
        return {"rows_touched": float(rows), "row_bytes": row_bytes if cross else ""}
    except ValueError:
        raise ValueError(f"--sparse_table: write it like 2000x256B. Received: {text!r}") from None


def _read(name: str) -> Mapping[str, Any]:
    data = _parsed(pathlib.Path(name).read_text(encoding="utf-8"), name)
    if not isinstance(data, Mapping):
        raise ValueError(f"{name} must have a mapping with the keys cluster and model. Received: {data!r}")
    return data


def _parsed(text: str, name: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{name} is no YAML: {error}") from None


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Returns both mappings in one; the values of `above` replace those of `below`."""
    merged = dict(below)
    for key, value in above.items():
        under = merged.get(key)
        if isinstance(value, Mapping) and under is not None:
            # Anything but a mapping stays, and is refused where it is read.
            merged[key] = _merged(under, value) if isinstance(under, Mapping) else under
        else:
            merged[key] = value
    return merged


def _simulate(data: dict[str, Any]) -> Result:
    cluster = cluster_from_dict(data.pop("cluster"))
    model = model_from_dict(data.pop("model"))
    codec = codec_from_dict(data.pop("codec", None))
    policies = data.pop("policies", None)
    policies = [] if policies is None else policies
    if not isinstance(policies, list):
        raise ValueError(f"policies must be a list, such as ['BackupWorkers(spares=1)']. Received: {policies!r}")
    policies = [tfdist.flags.parse_policy(str(each), "--policies") for each in policies]
    strategy = str(data.pop("strategy", engines.PARAMETER_SERVER))
    arguments = {name: data.pop(name) for name in _RUN if name in data}
    if data:
        known = ("cluster", "model", "codec", "strategy", "policies", *_RUN)
        raise ValueError(f"unknown key {next(iter(data))!r}; use {', '.join(known)}")
    return simulate(
        cluster, model, strategy=_STRATEGIES.get(strategy, strategy), policies=policies, codec=codec, **arguments
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
