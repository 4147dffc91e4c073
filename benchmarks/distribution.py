# SPDX-License-Identifier: Apache-2.0
"""What distribution itself costs a step: its time beyond that of independent processes, and its hand-offs.

Rows `cost` and `handoffs` of run.py. Both hold on machines where TensorFlow computes more slowly than its rivals:
arithmetic is subtracted, or not counted.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import arena

SIZES = ("tiny", "1M", "25M")
_SEGMENT_SECS = 1.5
_STRACE_SECS = 20.0


@dataclasses.dataclass(frozen=True)
class _Contender:
    """Processes that train the same model.

    Attributes:
      name: in the tables.
      program: a key of `contender.CONTENDERS`.
      num_workers, num_ps: see `arena.Team`.
      alone: name of the contender that trains in as many independent processes; "" for such a one.
      steps_at_once: steps that the workers make at the same time; the seconds of one are so many times longer.
      needs: a module without which it is left out; "" for none.
    """

    name: str
    program: str
    num_workers: int = 2
    num_ps: int = 0
    alone: str = ""
    steps_at_once: int = 1
    needs: str = ""


_KERAS_ALONE = _Contender("Keras, independent", "multi_worker/independent")
_MPI = _Contender("multi-worker, MPI", "multi_worker/mpi", alone=_KERAS_ALONE.name, needs="mpi4py.MPI")
_COLLECTIVES = _Contender("multi-worker, TensorFlow", "multi_worker/tensorflow", alone=_KERAS_ALONE.name)
_TORCH_ALONE = _Contender("PyTorch, independent", "multi_worker/torch independent", needs="torch")
_DDP = _Contender("PyTorch DDP", "multi_worker/torch", alone=_TORCH_ALONE.name, needs="torch")
_SERVERS = _Contender("servers", "parameter_server/tfdist", 2, 1, _KERAS_ALONE.name, 2)
_COORDINATOR = _Contender("bare coordinator", "parameter_server/bare", 2, 1, _KERAS_ALONE.name, 2)
_BACKUP = _Contender("servers, BackupWorkers(0)", "parameter_server/spares=0", 2, 1, _KERAS_ALONE.name)
# Each group's contenders train by turns. A rival's cost is shown as a multiple of that of the others.
_GROUPS = (
    ((_KERAS_ALONE, _MPI, _COLLECTIVES, _TORCH_ALONE, _DDP), _DDP.name),
    ((_KERAS_ALONE, _SERVERS, _BACKUP, _COORDINATOR), _COORDINATOR.name),
)
_COUNTED = (
    _Contender("Keras alone", "one_device/plain", 0),
    _Contender("mirrored, stock", "mirrored/stock", 0),
    _Contender("mirrored", "mirrored/tfdist", 0),
    _MPI,
    _COLLECTIVES,
    _DDP,
    _SERVERS,
    _BACKUP,
    _COORDINATOR,
)


# The row `cost`.


def measure_cost(
    sizes: Sequence[str], rounds: int, say: Callable[[str], None], starts: int = 3
) -> list[dict[str, Any]]:
    """Returns a result for each contender and size: seconds of a step and of distribution by round.

    Args:
      sizes: keys of `sizes.SIZES`; those of `SIZES` are measured.
      rounds: segments of each contender after each start.
      say: told what happens.
      starts: how often the processes are started: of two that run the same program one is faster for as long as it
        lives.
    """
    results = []
    for size in [size for size in SIZES if size in sizes]:
        for group, rival in _GROUPS:
            contenders = _present(group)
            secs = collections.defaultdict[str, list[float]](list)
            for start in range(1, starts + 1):
                with _teams(contenders, size, say) as teams:
                    title = f"cost {size}, {start} of {starts}"
                    rates = arena.duel(teams, rounds, lambda number: "", lambda text: say(f"{title}: {text}"))  # noqa: B023
                    for contender, each in zip(contenders, rates.values(), strict=True):
                        secs[contender.name] += [contender.steps_at_once / rate for rate in each]
            say("")
            results += _costs(contenders, rival, size, secs)
    return results


def _costs(
    contenders: Sequence[_Contender], rival: str, size: str, secs: dict[str, list[float]]
) -> Iterator[dict[str, Any]]:
    costs = {
        each.name: [a - b for a, b in zip(secs[each.name], secs[each.alone], strict=True)]
        for each in contenders
        if each.alone
    }
    for name, cost in costs.items():
        result = {"contender": name, "size": size, "step_secs": secs[name], "cost_secs": cost, "rival": rival}
        if name != rival and rival in costs:
            # Noise may hide a cost altogether.
            pairs = zip(costs[rival], cost, strict=True)
            result["rival_over_cost"] = [theirs / own if own > 0 else None for theirs, own in pairs]
        yield result


def cost_summary(results: Sequence[dict[str, Any]]) -> str:
    """Returns a line for each result of `measure_cost`."""
    lines = [
        f"{'size':5}  {'cost':26}  {'ms of a step':>12}  {'ms of cost':>10}  {'quartiles':>15}  rival's cost over it"
    ]
    for each in results:
        low, high = _quartiles(each["cost_secs"])
        line = (
            f"{each['size']:5}  {each['contender']:26}  {1e3 * statistics.median(each['step_secs']):12.2f}  "
            f"{1e3 * statistics.median(each['cost_secs']):10.2f}  {f'{1e3 * low:.2f}-{1e3 * high:.2f}':>15}"
        )
        if ratios := [ratio for ratio in each.get("rival_over_cost", ()) if ratio is not None]:
            low, high = _quartiles(ratios)
            line += f"  {statistics.median(ratios):.2f} ({low:.2f}-{high:.2f}) {each['rival']}"
        lines.append(line)
    return "\n".join(lines)


# The row `handoffs`.


def measure_handoffs(sizes: Sequence[str], rounds: int, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Returns a result for each contender, size and kind of process: the counts of each round by step and process.

    Args:
      sizes: see `measure_cost`.
      rounds: segments that are counted, of each contender.
      say: told what happens.
    """
    results = []
    for size in [size for size in SIZES if size in sizes]:
        for contender in _present(_COUNTED):
            with _teams([contender], size, say) as (team,):
                say(f"handoffs {size}: {contender.name}")
                counted = [_counted(team) for _ in range(rounds)]
                calls = _system_calls(team)
            say("")
            for role in counted[0]:
                counts = {name: [each[role][name] for each in counted] for name in counted[0][role]}
                results.append(
                    {"contender": contender.name, "size": size, "process": role, "steps": team.steps}
                    | {"system_calls": calls.get(role), **counts}
                )
    return results


def handoffs_summary(results: Sequence[dict[str, Any]]) -> str:
    """Returns a line for each result of `measure_handoffs`."""
    names = ("voluntary_switches", "involuntary_switches", "page_faults", "cpu_ms")
    titles = ("voluntary", "involuntary", "page faults", "CPU ms", "system calls")
    head = f"{'size':5}  {'by step and process':26}  {'process':8}" + "".join(f"  {each:>12}" for each in titles)
    lines = [head]
    for each in results:
        counts = [f"{statistics.median(each[name]):12.1f}" for name in names]
        calls = "" if each["system_calls"] is None else f"{each['system_calls']:12.1f}"
        head = f"{each['size']:5}  {each['contender']:26}  {each['process']:8}"
        lines.append("  ".join([head, *counts, calls]).rstrip())
    return "\n".join(lines)


def _counted(team: arena.Team) -> dict[str, dict[str, float]]:
    """Trains for a segment; returns by kind of process the mean counts of a step and process."""
    before = {task: _counts(processes) for task, processes in team.processes().items()}
    team.segment()
    found = collections.defaultdict[str, list[dict[str, float]]](list)
    for task, processes in team.processes().items():
        after = _counts(processes)
        found[_role(task)].append({name: (after[name] - before[task][name]) / team.steps for name in after})
    return {
        role: {name: statistics.fmean([each[name] for each in of_role]) for name in of_role[0]}
        for role, of_role in found.items()
    }


def _counts(processes: Sequence[int]) -> dict[str, float]:
    """Returns what Linux has counted for these processes, over all of their threads."""
    found = collections.defaultdict[str, float](float)
    for process in processes:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            fields = pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
            found["page_faults"] += int(fields[7])
            found["cpu_ms"] += 1e3 * (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
            for thread in pathlib.Path(f"/proc/{process}/task").iterdir():
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                    status = dict(line.split(":\t", 1) for line in (thread / "status").read_text().splitlines())
                    found["voluntary_switches"] += int(status["voluntary_ctxt_switches"])
                    found["involuntary_switches"] += int(status["nonvoluntary_ctxt_switches"])
    return dict(found)


def _system_calls(team: arena.Team) -> dict[str, float]:
    """Returns the system calls of a step by kind of process, in a segment under strace; {} where it can't be used."""
    if shutil.which("strace") is None:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        tracers = {}
        for task, processes in team.processes().items():
            command = ["strace", "-f", "-c", "-qq", "-o", f"{folder}/{task}", *(f"-p{each}" for each in processes)]
            tracers[task] = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        try:
            team.segment()
            team.segment()
        finally:
            for tracer in tracers.values():
                # It writes its table then.
                tracer.terminate()
            for tracer in tracers.values():
                tracer.wait(_STRACE_SECS)
        found = collections.defaultdict[str, list[float]](list)
        for task in tracers:
            total = _total(pathlib.Path(f"{folder}/{task}"))
            if total is not None:
                found[_role(task)].append(total / team.steps / 2)
    return {role: statistics.fmean(each) for role, each in found.items()}


def _total(table: pathlib.Path) -> int | None:
    """Returns the number of calls in a table of strace, whose last line is: percent, seconds, usecs, calls, ..."""
    lines = table.read_text().splitlines() if table.exists() else []
    fields = lines[-1].split() if lines else []
    return int(fields[3]) if fields[-1:] == ["total"] else None


def _role(task: str) -> str:
    return task.partition(":")[0]


# Both.


def _present(contenders: Sequence[_Contender]) -> list[_Contender]:
    """Returns the contenders whose modules can be imported, and says which can't."""
    return [each for each in contenders if not each.needs or _can_import(each.needs)]


@functools.cache
def _can_import(module: str) -> bool:
    # In a process of its own: mpi4py loads the MPI library.
    found = subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True, check=False)
    if found.returncode:
        print(f"left out, because it can't be imported: {module}", flush=True)
    return not found.returncode


@contextlib.contextmanager
def _teams(contenders: Sequence[_Contender], size: str, say: Callable[[str], None]) -> Iterator[list[arena.Team]]:
    """Starts the processes of these contenders, and warms them up."""
    with contextlib.ExitStack() as stack:
        started = [(each, arena.Team(each.program, size, each.num_workers, each.num_ps)) for each in contenders]
        teams = [stack.enter_context(team) for _, team in started]
        for contender, team in started:
            say(f"{size}: starting {contender.name}")
            team.wait_ready()
            team.calibrate(_SEGMENT_SECS, 4 * contender.num_workers if contender.num_ps else 1)
        yield teams


def _quartiles(values: Sequence[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high
