# SPDX-License-Identifier: Apache-2.0
"""`ParameterServerStrategy` under unmodified Keras, on one embedded cluster of four workers.

The tests themselves stand in `parameter_server_*.py`. They run in one child process, because TensorFlow's context
belongs to the cluster once it is joined; what each of them found is a test here.
"""

from __future__ import annotations

import ast
import os
import pathlib
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest

pytestmark = [pytest.mark.processes, pytest.mark.timeout(420)]

HERE = pathlib.Path(__file__).resolve().parent
FILES = sorted(path for path in HERE.glob("parameter_server_*.py") if path.name != "parameter_server_cluster.py")
CHECKS = [
    (path.stem, node.name)
    for path in FILES
    for node in ast.parse(path.read_text()).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], list[str]]:
    """What went wrong, by file and test; a test that did not run is missing."""
    report = tmp_path_factory.mktemp("parameter_server") / "report.xml"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "parameter_server_cluster", "-p", "no:cacheprovider"),
            *(f"--junitxml={report}", "--timeout=60", "--tb=short", *map(str, FILES)),
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[1])])},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert report.exists(), done.stdout[-5000:] + done.stderr[-5000:]
    found: dict[tuple[str, str], list[str]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        problems = found.setdefault((case.get("classname", "").split(".")[-1], case.get("name", "").split("[")[0]), [])
        problems += [f"{case.get('name')}\n{problem.text}" for problem in case if problem.tag in ("failure", "error")]
    return found


@pytest.mark.parametrize(("file", "name"), CHECKS, ids=[name for _, name in CHECKS])
def test_on_a_cluster(outcomes: dict[tuple[str, str], list[str]], file: str, name: str) -> None:
    assert (file, name) in outcomes, "it did not run"
    if outcomes[file, name]:
        pytest.fail("\n\n".join(outcomes[file, name]), pytrace=False)
