# SPDX-License-Identifier: Apache-2.0
"""Runs files of checks in a pytest of their own: a process that has joined a cluster belongs to it for good.

What each check found becomes a test of the pytest that asks.
"""

from __future__ import annotations

import ast
import os
import pathlib
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence

import pytest

HERE = pathlib.Path(__file__).resolve().parent

Outcomes = dict[tuple[str, str], list[str]]


def checks(files: Sequence[pathlib.Path]) -> list[tuple[str, str]]:
    """(file, function) of every check in these files."""
    return [
        (path.stem, node.name)
        for path in files
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]


def selected(request: pytest.FixtureRequest) -> list[str]:
    """Ids of the checks whose tests of this module are to run: `-k` and single ids choose them."""
    chosen = [item.callspec.params for item in request.session.items if item.path == request.path]
    return [f"{HERE / params['file']}.py::{params['name']}" for params in chosen]


def run(ids: Sequence[str], plugin: str, report: pathlib.Path, timeout_secs: float) -> Outcomes:
    """What went wrong in each check; one that did not run is missing.

    Args:
      ids: of the checks.
      plugin: the module with their fixtures.
      report: a file to write to.
      timeout_secs: for all of them together.
    """
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", plugin, "-p", "no:cacheprovider"),
            *(f"--junitxml={report}", "--timeout=240", "--tb=short", *ids),
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent), os.environ["PYTHONPATH"]])},
        capture_output=True,
        text=True,
        timeout=timeout_secs,
    )
    assert report.exists(), done.stdout[-5000:] + done.stderr[-5000:]
    found: Outcomes = {}
    for case in ElementTree.parse(report).iter("testcase"):
        problems = found.setdefault((case.get("classname", "").split(".")[-1], case.get("name", "").split("[")[0]), [])
        problems += [f"{case.get('name')}\n{problem.text}" for problem in case if problem.tag in ("failure", "error")]
    return found


def expect_success(outcomes: Outcomes, file: str, name: str) -> None:
    """Fails with what the check found."""
    assert (file, name) in outcomes, "it did not run"
    if outcomes[file, name]:
        pytest.fail("\n\n".join(outcomes[file, name]), pytrace=False)
