# SPDX-License-Identifier: Apache-2.0
"""The table of `tfdist advise`."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from typing import Any

from tfdist.advisor import numbers
from tfdist.advisor.advice import Row
from tfdist.advisor.statistical import Estimate

_RICH_WIDTH = 180
_SHOWN_FROM = 0.5


def write(found: Sequence[Row], chosen: Row, stream: Any) -> None:
    """Writes the table; in colour where the stream is a terminal."""
    # Only here, because importing rich takes a while.
    from rich.console import Console
    from rich.table import Table

    header, lines = cells(found)
    width = shutil.get_terminal_size().columns if stream.isatty() else _RICH_WIDTH
    table = Table(header_style="bold", box=None, pad_edge=False, show_edge=False)
    texts = ("strategy", "policies", "limit")
    for name in header:
        table.add_column(name, justify="left" if name in texts else "right", no_wrap=name not in texts)
    for row, line in zip(found, lines, strict=True):
        table.add_row(*line, style="bold green" if row is chosen else None)
    Console(file=stream, width=width, highlight=False, markup=False).print(table)


def worth_showing(found: Sequence[Row], chosen: Row) -> list[Row]:
    """Returns the rows without those that make less than half of the best with as many workers, and are no baseline."""
    best: dict[int, float] = {}
    for row in found:
        best[row.workers] = max(best.get(row.workers, 0.0), row.prediction.examples_per_sec)
    return [row for row in found if row is chosen or _is_worth_showing(row, best[row.workers])]


def _is_worth_showing(row: Row, best: float) -> bool:
    is_baseline = row.candidate is None or row.candidate.label in ("synchronous", "asynchronous")
    return is_baseline or row.prediction.examples_per_sec >= _SHOWN_FROM * best


def cells(found: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Returns the names of the columns, and the texts of each row; columns that nothing is known of are left out."""
    header = [
        "workers",
        "ps",
        "strategy",
        "policies",
        "examples/s",
        "90 % interval",
        "efficiency",
        "time",
        "cost",
        "to a loss (model)",
    ]
    lines = [[*_cells(row), row.limit] for row in found]
    header.append("limit")
    kept = [
        index
        for index, name in enumerate(header)
        if name not in ("time", "cost", "to a loss (model)") or any(line[index] for line in lines)
    ]
    return [header[index] for index in kept], [[line[index] for index in kept] for line in lines]


def _cells(row: Row) -> list[str]:
    own, predicted = row.candidate, row.prediction
    return [
        str(row.workers),
        str(own.servers) if own and own.servers else "",
        own.strategy.removesuffix("Strategy") if own else "one device",
        own.label if own else "",
        numbers.number(predicted.examples_per_sec),
        f"{numbers.number(predicted.low)} to {numbers.number(predicted.high)}",
        f"{predicted.efficiency:.0%}",
        _between(row.secs, numbers.duration),
        _between(row.cost, numbers.number),
        _between(row.speedup_to_loss, lambda each: f"{each:.1f}x"),
    ]


def _between(estimate: Estimate | None, text: Any) -> str:
    return f"{text(estimate.low)} to {text(estimate.high)}" if estimate else ""
