# SPDX-License-Identifier: Apache-2.0
"""The run of Keras' own tests: what it compares, and that it tries each test under the strategy."""

from __future__ import annotations

import importlib
import json
import os
import pathlib
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest

pytestmark = pytest.mark.slow

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "experiments" / "keras_tests"
TESTS = """
import os
import tensorflow as tf
from keras.src import testing

class TestTrainer(testing.TestCase):
    def test_has_scope(self):
        self.assertFalse(tf.distribute.has_strategy() and "unlisted" in os.environ.get("TFDIST_TEST", ""))

    def test_without_scope(self):
        self.assertFalse(tf.distribute.has_strategy())

    def test_ends_process(self):
        if tf.distribute.has_strategy():
            os._exit(3)

    def test_fails_on_one_device(self):
        self.fail()
"""
LIST = '[[listed]]\nreason = "no scope"\nstrategies = ["mirrored"]\ntests = ["a_test.py::T::test_without_scope"]\n'
LIST = LIST.replace("a_test.py::T::", "trainer_test.py::TestTrainer::")


@pytest.fixture
def keras_outcomes(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("keras_outcomes")


def _outcomes(**outcomes: str) -> dict[str, Any]:
    return {f"keras/src/a_test.py::T::{name}": {"outcome": outcome} for name, outcome in outcomes.items()}


def test_compare_unlisted_failure_is_reported(keras_outcomes: ModuleType):
    one = _outcomes(good="passed", bad="passed", gone="passed", lame="failed", skipped="skipped")
    under = _outcomes(good="passed", bad="failed", lame="failed", skipped="skipped")
    listed = [keras_outcomes.Listed("a reason", ("ps",), ("a_test.py::T::bad", "a_test.py::T::good"))]
    found = keras_outcomes.compare("ps", under, one, listed)
    assert [test.split("::")[-1] for test in found.listed] == ["bad"]
    assert [test.split("::")[-1] for test in found.needless] == ["good"]
    assert [test.split("::")[-1] for test in found.missing] == ["gone"]
    assert [test.split("::")[-1] for test in keras_outcomes.compare("multi", under, one, listed).failed] == ["bad"]


def test_list_of_keras_tests_is_readable(keras_outcomes: ModuleType):
    for entry in keras_outcomes.read(FOLDER / "listed.toml"):
        assert entry.reason
        assert set(entry.strategies) <= set(keras_outcomes.NAMES) - {"one"}


@pytest.mark.processes
def test_run_crashing_test_is_named_and_others_run(tmp_path: pathlib.Path):
    source = tmp_path / "keras" / "src" / "trainers"
    source.mkdir(parents=True)
    (source / "trainer_test.py").write_text(TESTS)
    (tmp_path / "listed.toml").write_text(LIST)
    flags = [f"--src={tmp_path}", f"--logs={tmp_path / 'logs'}", f"--list={tmp_path / 'listed.toml'}"]
    command = [sys.executable, str(FOLDER / "run.py"), *flags, "--kinds=one,mirrored", f"--page={tmp_path / 'page.md'}"]
    done = subprocess.run(command, env={**os.environ}, capture_output=True, text=True, timeout=200)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "3 of 4 tests pass on one device" in done.stdout
    assert "MirroredStrategy: 1 pass, 1 are listed" in done.stdout
    (line,) = [line for line in done.stdout.splitlines() if "  fails: " in line]
    assert "test_ends_process: ended its process or took too long" in line
    kept = json.loads((tmp_path / "logs" / "outcomes.json").read_text())
    assert len(kept["mirrored"]) == 4
