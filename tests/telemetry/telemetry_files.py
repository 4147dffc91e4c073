# SPDX-License-Identifier: Apache-2.0
"""Reads event files back, and the table of tags in docs/telemetry.md."""

from __future__ import annotations

import collections
import pathlib
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import tensorflow as tf

DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs" / "telemetry.md"

Scalars = dict[str, dict[int, float]]


class Tag(NamedTuple):
    """A row of the table."""

    run: str
    name: str
    kind: str
    written: str


def documented() -> list[Tag]:
    """The rows of the table."""
    rows = re.findall(r"^\| (\S+) \| `(tfdist/[^`]+)` \| (\w+) \| ([^|]+) \|", DOCS.read_text(), re.MULTILINE)
    return [Tag(run.strip("`"), name, kind, written.strip()) for run, name, kind, written in rows]


def event_files(log_dir: pathlib.Path) -> list[pathlib.Path]:
    """All event files of Telemetry below a directory, as they were made."""

    def by_numbers(path: pathlib.Path) -> list[str | int]:
        # The last number in a name counts the files of a process: 10 comes after 9.
        return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", str(path))]

    return sorted(log_dir.rglob("*.tfdist"), key=by_numbers)


def values(log_dir: pathlib.Path) -> Iterator[tuple[str, int, Any]]:
    """Yields the run, the step and the proto of each value below `log_dir`."""
    for path in event_files(log_dir):
        for event in tf.compat.v1.train.summary_iterator(str(path)):
            for value in event.summary.value:
                yield str(path.parent.relative_to(log_dir)), event.step, value


def kind_of(value: Any) -> str:
    """Kind of a value: scalar, histogram or text."""
    if value.HasField("histo"):
        return "histogram"
    return value.metadata.plugin_data.plugin_name if value.HasField("tensor") else "scalar"


def scalars(log_dir: pathlib.Path, run: str) -> Scalars:
    """The scalars of a run, as {tag: {step: value}}."""
    found: Scalars = collections.defaultdict(dict)
    for path, step, value in values(log_dir):
        if path == run and kind_of(value) == "scalar":
            assert step not in found[value.tag], "one writer, one point for each step"
            found[value.tag][step] = value.simple_value
    return dict(found)


def tags(log_dir: pathlib.Path) -> dict[str, set[tuple[str, str]]]:
    """By run the tags and their kinds."""
    found: dict[str, set[tuple[str, str]]] = collections.defaultdict(set)
    for run, _, value in values(log_dir):
        found[run].add((re.sub("^tfdist/logs/.*", "tfdist/logs/<name>", value.tag), kind_of(value)))
    return dict(found)


def expected(run: str, *features: str) -> set[tuple[str, str]]:
    """The tags that the documentation promises for a run, in a training with these features of the column "Written".

    Args:
      run: "job", "train", "validation" or "process".
      *features: such as "decided"; a row with several needs all.
    """
    rows = [row for row in documented() if row.run == run]
    known = {"always", "each epoch", "batch size known", "every 5 s", *features}
    return {(row.name, row.kind) for row in rows if {each.strip("` ") for each in row.written.split(",")} <= known}
