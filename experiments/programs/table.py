# SPDX-License-Identifier: Apache-2.0
"""The page that shows what the runs of run.py gave."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_HEADERS = {
    "one": "one device",
    "stock": "stock MirroredStrategy",
    "mirrored": "MirroredStrategy",
    "multi": "MultiWorkerMirroredStrategy",
    "ps": "ParameterServerStrategy",
    "backup": "BackupWorkers(spares=0)",
}
# Programs draw random numbers on each replica, and parameter servers are asynchronous.
_TOLERANCE = 0.25
_INTRODUCTION = """# Programs of others

Tutorials, guides and examples of TensorFlow, Keras and keras.io, run as they are but for the name of the strategy. In
programs without a strategy, the lines that make or compile models, optimizers and metrics are under `with
strategy.scope():`. Data are synthetic, downloaded weights random, epochs cut to 2 of at most 6 steps, names of Keras 2
replaced.

Made by `make programs SRC=directory` ([experiments/programs](../experiments/programs/README.md)) in one or several
runs, on two CPUs. The mirrored strategies of one process have two devices, the others two workers.

- *works*: it came to its end, and its losses are at most 25% above the losses on one device. They are those that `fit`
  showed, or that the program printed without `fit`.
- *differs*: it came to its end with another loss, for which dropout, random batches and asynchronous updates are
  enough.
- *ends*: it came to its end, and shows no loss that could be compared. *too slow*: it was ended after the time limit.
  *-*: not run.
- *First step*: CPU seconds from the first call of `fit` to the end of its first step, under `MirroredStrategy` and
  the stock one.
"""


def page(found: dict[str, Any], programs: Sequence[str], kinds: Sequence[str]) -> str:
    """The page in Markdown."""
    ran = [program for program in programs if program in found]
    rows = [_row(program, found[program], kinds) for program in ran]
    header = ["Program", *(_HEADERS[kind] for kind in kinds), "First step"]
    lines = [
        _INTRODUCTION,
        _line(header),
        _line(["---"] * len(header)),
        *map(_line, rows),
        "",
        *_totals(found, programs, kinds),
        *_ratios(found, programs),
        "",
        f"{len(ran)} of the {len(programs)} programs that are listed in `experiments/programs/programs.txt` were run.",
    ]
    reasons = [
        f"- `{program}`, {_HEADERS[kind]}: {_escaped(found[program][kind]['line'])}"
        for program in programs
        for kind in kinds
        if found.get(program, {}).get(kind, {}).get("line")
    ]
    if reasons:
        lines += ["", "## Last lines", "", *reasons]
    return "\n".join(lines) + "\n"


def _row(program: str, outcomes: dict[str, Any], kinds: Sequence[str]) -> list[str]:
    reference = outcomes.get("one", {}).get("losses", [])
    return [f"{program}", *(verdict(outcomes.get(kind), reference) for kind in kinds), _first_steps(outcomes)]


def _first_steps(outcomes: dict[str, Any]) -> str:
    """The times of ours and of the stock strategy, as far as there are any."""
    ours, stock = (outcomes.get(kind, {}).get("first_step_cpu_secs") for kind in ("mirrored", "stock"))
    return " / ".join("-" if secs is None else f"{secs:.1f}" for secs in (ours, stock)) if ours or stock else "-"


def verdict(outcome: dict[str, Any] | None, reference: Sequence[float]) -> str:
    """One cell of the table."""
    if outcome is None:
        return "-"
    if outcome["status"] != "works":
        return outcome["status"]
    if not reference:
        return "ends"
    shown = zip(outcome["losses"], reference, strict=False)
    is_close = all(loss <= other + _TOLERANCE * abs(other) + 0.05 for loss, other in shown)
    is_close = is_close and len(outcome["losses"]) == len(reference)
    if is_close:
        return "works"
    return f"differs: {outcome['losses'][-1]:.3g} for {reference[-1]:.3g}" if outcome["losses"] else "differs: no loss"


def _totals(found: dict[str, Any], programs: Sequence[str], kinds: Sequence[str]) -> list[str]:
    counts = []
    for kind in kinds:
        outcomes = [found[program][kind] for program in programs if kind in found.get(program, {})]
        ended = sum(outcome["status"] == "works" for outcome in outcomes)
        counts.append(f"{_HEADERS[kind]} {ended} of {len(outcomes)}")
    return [f"Came to their end: {'; '.join(counts)}."]


def _ratios(found: dict[str, Any], programs: Sequence[str]) -> list[str]:
    """A line about the times to the first step, if there are any to be compared."""
    pairs = [
        [found.get(each, {}).get(kind, {}).get("first_step_cpu_secs") for kind in ("mirrored", "stock")]
        for each in programs
    ]
    ratios = sorted(ours / stock for ours, stock in pairs if ours and stock)
    if not ratios:
        return []
    median, most = ratios[len(ratios) // 2], ratios[-1]
    shown = f"{median:.2f} times that of the stock strategy in the median of {len(ratios)} programs, {most:.2f} at most"
    return ["", f"CPU time to the first step under `MirroredStrategy`: {shown}."]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _escaped(text: str) -> str:
    return "`" + text.replace("`", "'").replace("|", "/") + "`"
