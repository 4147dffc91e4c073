# SPDX-License-Identifier: Apache-2.0
"""The table of `tfdist advise`."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from typing import Any

from tfdist.advisor import advice
from tfdist.advisor.advice import Row
from tfdist.advisor.candidates import MULTI_WORKER, PARAMETER_SERVER

# Where nobody says how wide the output is.
_WIDTH = 100
_SHOWN_FROM = 0.5
# Columns that go first where the table is too wide.
_LESS_NEEDED = ("90 % interval", "to a loss", "limit", "efficiency")
_STRATEGIES = {MULTI_WORKER: "multi-worker", PARAMETER_SERVER: "parameter server"}


def write(found: Sequence[Row], chosen: Row, stream: Any) -> None:
    """Writes the table as wide as the terminal, or COLUMNS, says; in colour where the stream is a terminal."""
    # Only here, because importing rich takes a while.
    from rich.console import Console
    from rich.table import Table

    width = shutil.get_terminal_size((_WIDTH, 24)).columns
    header, lines = cells(found, width)
    table = Table(header_style="bold", box=None, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for name in header:
        table.add_column(name, justify="left" if name in ("strategy", "policies", "limit") else "right", no_wrap=True)
    for row, line in zip(found, lines, strict=True):
        table.add_row(*line, style="bold green" if row is chosen else None)
    Console(file=stream, width=max(width, _needed(header, lines)), highlight=False, markup=False).print(table)


def worth_showing(found: Sequence[Row], chosen: Row) -> list[Row]:
    """Returns the rows without those that make less than half of the best with as many workers, and are no baseline."""
    best: dict[int, float] = {}
    for row in found:
        best[row.workers] = max(best.get(row.workers, 0.0), row.prediction.examples_per_sec)
    return [row for row in found if row is chosen or _is_worth_showing(row, best[row.workers])]


def _is_worth_showing(row: Row, best: float) -> bool:
    is_baseline = row.candidate is None or row.candidate.label in ("synchronous", "asynchronous")
    return is_baseline or row.prediction.examples_per_sec >= _SHOWN_FROM * best


def cells(found: Sequence[Row], width: int = 1000) -> tuple[list[str], list[list[str]]]:
    """Returns the names of the columns, and the texts of each row: as many columns as `width` characters have room for.

    Columns that nothing is known of are left out.
    """
    rows = [_cells(row) for row in found]
    header = [name for name in rows[0] if any(row[name] for row in rows)]
    for name in ("", *_LESS_NEEDED):
        header = [each for each in header if each != name]
        lines = [[row[each] for each in header] for row in rows]
        if _needed(header, lines) <= width:
            break
    return header, lines


def _needed(header: Sequence[str], lines: Sequence[Sequence[str]]) -> int:
    """Width of a table, with a space between columns."""
    return sum(max(map(len, column)) + 1 for column in zip(header, *lines, strict=True)) - 1


def _cells(row: Row) -> dict[str, str]:
    own, predicted, estimate = row.candidate, row.prediction, row.speedup_to_loss
    return {
        "workers": str(row.workers),
        "ps": str(own.servers) if own and own.servers else "",
        "strategy": _STRATEGIES[own.strategy] if own else "one device",
        "policies": own.label if own else "",
        "examples/s": advice.number_text(predicted.examples_per_sec),
        "90 % interval": f"{advice.number_text(predicted.low)} to {advice.number_text(predicted.high)}",
        "efficiency": f"{predicted.efficiency:.0%}",
        "time": advice.duration_text(row.secs.value) if row.secs else "",
        "cost": advice.number_text(row.cost.value) if row.cost else "",
        "to a loss": f"{estimate.value:.1f}x" if own and estimate and estimate.says_something else "",
        "limit": row.limit.short,
    }
