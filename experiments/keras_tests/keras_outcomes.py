# SPDX-License-Identifier: Apache-2.0
"""Compares outcomes of tests under a strategy with those on one device, and writes the page that shows them."""

from __future__ import annotations

import collections
import dataclasses
import fnmatch
import pathlib
import tomllib
from collections.abc import Mapping
from typing import Any

NAMES = {
    "one": "one device",
    "mirrored": "MirroredStrategy",
    "multi": "MultiWorkerMirroredStrategy",
    "ps": "ParameterServerStrategy",
    "backup": "BackupWorkers(spares=0)",
}
Outcomes = Mapping[str, Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class Listed:
    """Tests that can't pass under some strategies, and the reason."""

    reason: str
    strategies: tuple[str, ...]
    tests: tuple[str, ...]

    def has(self, kind: str, test: str) -> bool:
        """Looks the test up; a pattern is the end of a test's id."""
        return kind in self.strategies and any(fnmatch.fnmatchcase(test, f"*/{pattern}") for pattern in self.tests)


def read(path: pathlib.Path) -> list[Listed]:
    """Reads the list."""
    entries = tomllib.loads(path.read_text()).get("listed", [])
    return [Listed(entry["reason"], tuple(entry["strategies"]), tuple(entry["tests"])) for entry in entries]


@dataclasses.dataclass
class Comparison:
    """Tests that pass on one device, by what became of them under one strategy."""

    passed: list[str] = dataclasses.field(default_factory=list)
    listed: list[str] = dataclasses.field(default_factory=list)
    # Not listed.
    failed: list[str] = dataclasses.field(default_factory=list)
    missing: list[str] = dataclasses.field(default_factory=list)
    # Listed, and yet they pass.
    needless: list[str] = dataclasses.field(default_factory=list)


def compare(kind: str, outcomes: Outcomes, on_one_device: Outcomes, listed: list[Listed]) -> Comparison:
    """Compares test by test. A test without an outcome is missing."""
    found = Comparison()
    for test in passing(on_one_device):
        is_listed = any(entry.has(kind, test) for entry in listed)
        if test not in outcomes:
            found.missing.append(test)
        elif outcomes[test]["outcome"] == "passed":
            found.passed.append(test)
            if is_listed:
                found.needless.append(test)
        else:
            (found.listed if is_listed else found.failed).append(test)
    return found


def passing(outcomes: Outcomes) -> list[str]:
    """The tests that pass."""
    return [test for test, outcome in outcomes.items() if outcome["outcome"] == "passed"]


def page(version: str, found: Mapping[str, Outcomes], listed: list[Listed]) -> str:
    """The page in Markdown."""
    one = found["one"]
    kinds = [kind for kind in NAMES if kind != "one" and kind in found]
    compared = {kind: compare(kind, found[kind], one, listed) for kind in kinds}
    rows = [_row(file, one, compared) for file in dict.fromkeys(map(_file, passing(one)))]
    rows.append(_row("", one, compared))
    lines = [
        _INTRODUCTION.format(version=version, tests=len(one), passing=len(passing(one))),
        _line(["Tests of", "pass on one device", *(NAMES[kind] for kind in kinds)]),
        _line(["---"] * (len(kinds) + 2)),
        *map(_line, rows),
        "",
        "## Tests that are listed",
        "",
        "`experiments/keras_tests/listed.toml` names the tests of each reason.",
        "",
        *_reasons(listed, compared),
    ]
    unlisted = [f"- `{test}`, {NAMES[kind]}" for kind in kinds for test in compared[kind].failed]
    if unlisted:
        lines += ["", "## Tests that fail, and are not listed", "", *unlisted]
    return "\n".join(lines) + "\n"


def _row(file: str, one: Outcomes, compared: Mapping[str, Comparison]) -> list[str]:
    def count(tests: list[str]) -> int:
        return sum(not file or _file(test) == file for test in tests)

    cells = []
    for comparison in compared.values():
        parts = [f"{count(comparison.passed)}"]
        parts += [f"{count(comparison.listed)} listed"] if count(comparison.listed) else []
        parts += [f"{count(comparison.failed)} fail"] if count(comparison.failed) else []
        parts += [f"{count(comparison.missing)} not run"] if count(comparison.missing) else []
        cells.append(", ".join(parts))
    return [f"`{file}`" if file else "all", str(count(passing(one))), *cells]


def _reasons(listed: list[Listed], compared: Mapping[str, Comparison]) -> list[str]:
    lines = []
    for entry in listed:
        counts = collections.Counter(
            kind for kind, found in compared.items() for test in found.listed if entry.has(kind, test)
        )
        shown = ", ".join(f"{NAMES[kind]} {count}" for kind, count in counts.items())
        if shown:
            lines.append(f"- {entry.reason} ({shown})")
    return lines or ["None."]


def _file(test: str) -> str:
    return test.split("::")[0].removeprefix("keras/src/")


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


_INTRODUCTION = """# Keras' own tests

Tests of Keras {version} for training, callbacks, optimizers and distribution, each run in the scope of a strategy. Of
{tests} tests {passing} pass on one device; the others are skipped, or need a package that is not installed. What
became of those that pass on one device is shown here; a listed test has a reason why it can't pass under a strategy.

Made by `make test-keras` ([experiments/keras_tests](../experiments/keras_tests/README.md)): two devices under
MirroredStrategy, two processes under MultiWorkerMirroredStrategy, two workers and one parameter server under
ParameterServerStrategy. Counts may be of several runs of parts, put together (`--resume`); the latest of each test
counts.
"""
