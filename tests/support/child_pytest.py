# SPDX-License-Identifier: Apache-2.0
"""Runs files of checks in a pytest of their own: a process that has joined a cluster belongs to it for good.

Of several workers each runs the same checks. What they found becomes tests of the pytest that asks, and how long each
took becomes the property `secs` of its test.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import importlib
import os
import pathlib
import subprocess
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Collection, Sequence
from typing import Any

import prefork
import pytest

from tfdist import Cluster, Task
from tfdist.launchers.supervise.processes import PortReservation

# The folder of all tests.
HERE = pathlib.Path(__file__).resolve().parents[1]
# A directory that is the same for all workers.
SHARED = "TFDIST_TEST_SHARED"
_PROGRAM = """
import sys
import pytest
sys.exit(pytest.main({arguments!r}))
"""


@dataclasses.dataclass
class Outcomes:
    """Outcomes of checks.

    Attributes:
      problems: of each check that ran, by its key.
      output: the end of what the processes have written.
    """

    problems: dict[tuple[str, str], list[str]]
    output: str


@dataclasses.dataclass(frozen=True)
class Check:
    """A check, with its parameter where it has a test of its own for each."""

    path: pathlib.Path
    owner: str
    name: str

    @property
    def key(self) -> tuple[str, str]:
        """Class or file, and name."""
        return self.owner or self.path.stem, self.name

    def __str__(self) -> str:
        return f"{self.path}::{self.owner}::{self.name}" if self.owner else f"{self.path}::{self.name}"


def checks(files: Sequence[pathlib.Path]) -> list[Any]:
    """A `pytest.param` for every check in these files: functions, and those that classes inherit."""
    found = []
    for path in files:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                is_slow = "pytest.mark.slow" in map(ast.unparse, node.decorator_list)
                found.append(_param(Check(path, "", node.name), [pytest.mark.slow] if is_slow else []))
            elif isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
                suite = getattr(importlib.import_module(path.stem), node.name)
                found += [_param(Check(path, node.name, name), marks) for name, marks in suite.checks()]
    return found


def _param(check: Check, marks: list[pytest.MarkDecorator]) -> Any:
    name = f"{check.owner}-{check.name}" if check.owner else check.name
    return pytest.param(check, id=name, marks=marks)


def run(
    request: pytest.FixtureRequest,
    plugin: str,
    shared: pathlib.Path,
    timeout_secs: float,
    num_workers: int = 0,
    owners: Collection[str] | None = None,
) -> Outcomes:
    """Runs the checks whose tests of this module are to run; returns the problems of each that ran.

    Args:
      request: of a fixture of the module: `-k`, `-m` and single ids choose checks.
      plugin: the module with their fixtures.
      shared: an empty directory.
      timeout_secs: for all of them together.
      num_workers: how many workers of one cluster run them; 0 for a process without TF_CONFIG.
      owners: the classes of the checks to run, of which "" is none; all by default.
    """
    ours = {item: item.callspec.params["check"] for item in request.session.items if item.path == request.path}
    chosen = [str(check) for check in ours.values() if owners is None or check.owner in owners]
    options = ["-q", "-p", plugin, "-p", "no:cacheprovider", "--timeout=240", "--tb=short"]
    options += ["-m", request.config.option.markexpr, f"--rootdir={HERE.parent}"]
    with PortReservation(num_workers) as reserved, contextlib.ExitStack() as stack:
        folders = [str(HERE / name) for name in ("strategies", "conformance", "support")]
        addresses = dict(enumerate(f"127.0.0.1:{port}" for port in reserved.ports))
        processes = []
        for index in range(num_workers or 1):
            report = shared / f"{index}.xml"
            script = shared / f"{index}.py"
            script.write_text(_PROGRAM.format(arguments=[*options, f"--junitxml={report}", *chosen]))
            environment = {
                **os.environ,
                "PYTHONPATH": os.pathsep.join([*folders, os.environ["PYTHONPATH"]]),
                SHARED: str(shared),
            }
            if num_workers:
                environment["TF_CONFIG"] = Cluster({"worker": addresses}, Task("worker", index)).to_tf_config()
            log = stack.enter_context((shared / f"{index}.log").open("wb"))
            processes.append(prefork.start(script, environment, log, HERE.parent, index))
            stack.callback(processes[-1].end)
        deadline = time.monotonic() + timeout_secs
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(1.0, deadline - time.monotonic()))
    indices = range(num_workers or 1)
    (first, secs), *rest = (_read(shared / f"{index}.xml") for index in indices)
    others = [found for found, _ in rest]
    for item, check in ours.items():
        if check.key in secs:
            item.user_properties.append(("secs", secs[check.key]))
    problems = {
        key: [*found, *(problem for each in others for problem in each[key])]
        for key, found in first.items()
        if all(key in each for each in others)
    }
    logs = [(shared / f"{index}.log").read_text(errors="replace")[-5000:] for index in indices]
    return Outcomes(problems, "\n----\n".join(logs))


def files(name: str) -> list[pathlib.Path]:
    """The files of checks whose name begins so, in any folder."""
    return sorted(HERE.glob(f"*/{name}_*checks.py"))


def outcomes_of(plugin: str, timeout_secs: float) -> Any:
    """A fixture of a module: the outcomes of its checks, in one process with one embedded cluster; see `run`."""

    @pytest.fixture(scope="module", name="outcomes")
    def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
        return run(request, plugin, tmp_path_factory.mktemp("cluster"), timeout_secs)

    return outcomes


def _read(report: pathlib.Path) -> tuple[dict[tuple[str, str], list[str]], dict[tuple[str, str], float]]:
    """(problems, seconds) by check, and by check with its parameters; nothing without a report."""
    found: dict[tuple[str, str], list[str]] = {}
    secs: dict[tuple[str, str], float] = {}
    for case in ElementTree.parse(report).iter("testcase") if report.exists() else ():
        owner, name = case.get("classname", "").split(".")[-1], case.get("name", "")
        problems = [f"{name}\n{problem.text}" for problem in case if problem.tag in ("failure", "error")]
        for key in {name, name.split("[")[0]}:
            found.setdefault((owner, key), []).extend(problems)
            secs[owner, key] = secs.get((owner, key), 0.0) + float(case.get("time", 0.0))
    return found, secs


def expect_success(outcomes: Outcomes, check: Check) -> None:
    """Fails with what the check found."""
    problems = outcomes.problems.get(check.key, [f"it did not run\n{outcomes.output}"])
    if problems:
        pytest.fail("\n\n".join(problems), pytrace=False)
