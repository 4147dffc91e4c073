# SPDX-License-Identifier: Apache-2.0
"""A TensorFlow or Keras that lacks what `tfdist.compat` needs is refused in one line, before anything trains."""

from __future__ import annotations

import ast
import functools
import pathlib
import re
import sys
from collections.abc import Iterator

import keras
import private_names
import programs
import pytest
import tensorflow as tf
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer

from tfdist.compat import versions

pytestmark = pytest.mark.devices

COMPAT = pathlib.Path(versions.__file__).parent
TREES = {
    ".".join(path.relative_to(COMPAT).with_suffix("").parts): ast.parse(path.read_text(encoding="utf-8"))
    for path in sorted(COMPAT.rglob("*.py"))
}
BUILD = "keras.src.backend.tensorflow.trainer:TensorFlowTrainer._maybe_symbolic_build(self, iterator)"


@pytest.fixture
def unchecked() -> None:
    versions.check.cache_clear()


@pytest.mark.parametrize("module", versions.all_needs())
def test_the_installed_versions_have_all_that_is_needed(module: str):
    assert [need for need in versions.all_needs()[module] if not versions.has(need)] == []


@pytest.mark.parametrize("module", TREES)
def test_private_imports_are_among_the_needs(module: str):
    needs = versions.all_needs().get(module, ())
    missing = [name for name in _imported(TREES[module]) if not any(need.startswith(_forms(name)) for need in needs)]
    assert missing == []


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and private_names.is_private_import(node):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _forms(name: str) -> tuple[str, ...]:
    """Prefixes of the needs of a module, or of something in a module."""
    module, _, last = name.rpartition(".")
    return f"{name}:", f"{name}.", f"{module}:{last}"


@pytest.mark.parametrize("module", TREES)
def test_private_attributes_are_among_the_needs(module: str):
    needs = {part for each in versions.all_needs().values() for need in each for part in re.split(r"[:.(]", need)}
    used = {found[1] for found in map(private_names.private_attribute, ast.walk(TREES[module])) if found}
    assert {name for name in used - _own() if not name.startswith("_tfdist_")} <= needs


@functools.cache
def _own() -> set[str]:
    """The private names that tfdist itself defines."""
    return private_names.defined(ast.parse(path.read_text(encoding="utf-8")) for path in COMPAT.parent.rglob("*.py"))


def test_the_versions_that_setup_admits_are_those_that_are_said():
    setup = ast.parse((programs.ROOT / "setup.py").read_text(encoding="utf-8"))
    requirements = next(
        ast.literal_eval(node.value)
        for node in ast.walk(setup)
        if isinstance(node, ast.keyword) and node.arg == "install_requires"
    )
    assert {name + bounds for name, bounds in versions.ADMITTED.items()} <= set(requirements)


@pytest.mark.usefixtures("unchecked")
def test_a_missing_name_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(TensorFlowTrainer, "_maybe_symbolic_build")
    monkeypatch.setitem(sys.modules, "tensorflow.python.eager.backprop", None)
    with pytest.raises(RuntimeError) as raised:
        versions.check()
    assert str(raised.value) == (
        f"tfdist needs what the installed TensorFlow or Keras does not have: {BUILD}, tensorflow.python.eager.backprop:"
        "_gradient_function(op_name, attr_tuple, num_inputs, inputs, outputs, out_grads), "
        "tensorflow.python.eager.backprop:_handle_or_self; install other versions (tensorflow>=2.20,<2.22, "
        f"keras>=3.15,<3.17) or a newer tfdist. Received: tensorflow {tf.__version__}, keras {keras.__version__}"
    )


@pytest.mark.parametrize(
    ("need", "expected"),
    [
        ("keras:Model.fit", True),
        ("keras:Model.fit(x, epoch_iterator)", True),
        ("keras:Model.fit(x, no_such_argument)", False),
        ("keras:Model.no_such_method", False),
        ("keras.src.trainers.epoch_iterator:EpochIterator._steps_seen", True),
        ("keras.src.trainers.epoch_iterator:EpochIterator._no_such_count", False),
        ("keras.src.no_such_module:Name", False),
    ],
)
def test_needs_are_modules_attributes_and_arguments(need: str, expected: bool):
    assert versions.has(need) is expected


@pytest.mark.slow
@pytest.mark.processes
def test_a_version_without_an_imported_name_is_refused_with_that_line(tmp_path: pathlib.Path):
    script = """
    import keras.src.backend.tensorflow.trainer as trainer
    del trainer.TFEpochIterator
    for public in (lambda: tfdist.MirroredStrategy, lambda: tfdist.callbacks.Resume):
        try:
            public()
        except RuntimeError as error:
            print("refused:", error)
    """
    with programs.running(script, tmp_path, is_fork=False) as program:
        assert program.wait() == 0, program.output
    refusals = [line for line in program.output.splitlines() if line.startswith("refused:")]
    assert len(refusals) == 2
    for line in refusals:
        assert "tfdist needs what the installed TensorFlow or Keras does not have: keras.src.backend." in line
        assert "TFEpochIterator" in line
