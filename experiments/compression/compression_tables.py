# SPDX-License-Identifier: Apache-2.0
"""Writes the tables in Markdown: each net with all codecs, and Strom's published figures next to ours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Row = Mapping[str, Any]

# Strom 2015, bytes per minibatch of 14.6 M parameters: setting, bytes, and our codecs beside it.
STROM = [
    ("float32", 58.4e6, ["none"]),
    ("float16", 29.2e6, ["float16"]),
    ("tau=2", 0.21e6, ["tau-2e-3", "threshold-1e-2"]),
    ("tau=2, entropy coded", 0.21e6 / 3, ["threshold-2e-3"]),
    ("tau=15 (accuracy suffers)", 4.5e3, ["tau-2e-2", "threshold-1e-4"]),
]


def all_tables(summary: Mapping[str, Row], nets: Mapping[str, str]) -> str:
    """Returns a table per net and, with the dense net, Strom's.

    Args:
      summary: rows of `compression_runs.summarize` by run.
      nets: title of each net.
    """
    trained = [net for net in nets if any(row["net"] == net for row in summary.values())]
    tables = [net_table(net, nets[net], summary) for net in trained]
    if "dense-none" in summary:
        tables.append(strom_table(summary))
    return "\n\n".join(tables) + "\n"


def progress(row: Row) -> str:
    """Returns one line of text, printed at the end of a run."""
    return (
        f"{row['net']:6}  {row['codec']:70}  {row['bytes']:12,.0f} bytes per update  "
        f"{ratio(row['share']):>8}  {row['accuracy']:7.2%}  {row['seconds']:6.1f} s"
    )


def ratio(share: float) -> str:
    """Returns a share as a fraction, such as 1/1,024."""
    denominator = round(1 / share)
    return "1" if denominator == 1 else f"1/{denominator:,}"


def net_table(net: str, title: str, summary: Mapping[str, Row]) -> str:
    """Returns the table of a net: a line per codec and density."""
    uncompressed = summary.get(f"{net}-none")
    lines = [
        f"| {title} | density | bytes per update | of float32 | accuracy | points behind | s |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in summary.values():
        if row["net"] == net:
            lines.append(
                f"| {_code(row['codec'])} | {row['density']} | {row['bytes']:,.0f} | "
                f"{ratio(row['share'])} | {row['accuracy']:.2%} | {_behind(row, uncompressed)} | {row['seconds']:.0f} |"
            )
    return "\n".join(lines)


def strom_table(summary: Mapping[str, Row]) -> str:
    """Returns Strom's published bytes per minibatch next to ours for the dense net."""
    lines = [
        "| Strom 2015 | bytes | of float32 | Dense net of the same size | bytes | of float32 | points behind |",
        "|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*lines, *_strom_lines(summary)])


def _strom_lines(summary: Mapping[str, Row]) -> Iterator[str]:
    for setting, size, names in STROM:
        theirs = f"{setting} | {_size(size)} | {ratio(size / STROM[0][1])}"
        rows = [summary[f"dense-{name}"] for name in names if f"dense-{name}" in summary]
        if not rows:
            yield f"| {theirs} | not run | | | |"
        for row in rows:
            ours = f"{_code(row['codec'])} | {_size(row['bytes'])} | {ratio(row['share'])}"
            yield f"| {theirs} | {ours} | {_behind(row, summary['dense-none'])} |"
            theirs = "| |"


def _behind(row: Row, uncompressed: Row | None) -> str:
    """Returns the points of accuracy by which a run is behind uncompressed training; negative if it is ahead."""
    if uncompressed is None:
        return ""
    points = 100 * (uncompressed["accuracy"] - row["accuracy"])
    return f"{points:.2f}".replace("-0.00", "0.00")


def _code(title: str) -> str:
    return f"`{title}`" if "(" in title else title


def _size(count: float) -> str:
    for unit, scale in (("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count:.0f} B"
