# SPDX-License-Identifier: Apache-2.0
"""The converter of programs that others wrote, and the words of its list."""

from __future__ import annotations

import importlib
import pathlib
from typing import Any

import pytest

pytestmark = pytest.mark.slow

HERE = pathlib.Path(__file__).resolve().parents[2] / "experiments" / "programs"


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    monkeypatch.syspath_prepend(str(HERE))
    return importlib.import_module("options"), importlib.import_module("convert")


def _converted(modules: tuple[Any, Any], directory: pathlib.Path, source: str, words: str = "") -> str:
    options, convert = modules
    (directory / "list.txt").write_text(f"# a comment\nprogram.py {words}\n")
    (directory / "program.py").write_text(source)
    given = options.read(directory / "list.txt")["program.py"]
    return convert.convert(directory / "program.py", given)[0]


def test_programs_that_are_listed_have_known_kinds(modules: tuple[Any, Any]) -> None:
    options, _ = modules
    for given in options.read(HERE / "programs.txt").values():
        assert {*given.kinds} <= {*options.KINDS}


def test_values_of_the_list_replace_numbers_and_names(modules: tuple[Any, Any], tmp_path: pathlib.Path) -> None:
    source = "def draw(n=30):\n    pass\nn = 7\nx.reshape(60000, 784)\ndraw(n=9)\n"
    converted = _converted(modules, tmp_path, source, "n=5 60000=11000")
    assert converted == "def draw(n=5):\n    pass\nn = 5\nx.reshape(11000, 784)\ndraw(n=5)"


def test_loops_over_data_end_early_outside_of_functions(modules: tuple[Any, Any], tmp_path: pathlib.Path) -> None:
    source = "def f(data):\n    for x in data:\n        pass\nfor step, x in enumerate(data):\n    pass\n"
    assert "def f(data):\n    for x in data:" in (converted := _converted(modules, tmp_path, source))
    assert "for (step, x) in enumerate(__some__(data)):" in converted.replace("for step, x in", "for (step, x) in")


def test_a_strategy_keeps_its_arguments(modules: tuple[Any, Any], tmp_path: pathlib.Path) -> None:
    source = "s = tf.distribute.ParameterServerStrategy(resolver, variable_partitioner=part)"
    assert _converted(modules, tmp_path, source) == "s = __strategy__(resolver, variable_partitioner=part)"
