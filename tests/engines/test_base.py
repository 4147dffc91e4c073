# SPDX-License-Identifier: Apache-2.0
"""Each engine has the protocol that data sets, strategies and checkpoints go by."""

from __future__ import annotations

import importlib
import inspect
import itertools
import pathlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import tensorflow as tf

import tfdist
from tfdist import engines
from tfdist.coordination.quorum import Kind, Verdict
from tfdist.engines.base import Engine
from tfdist.engines.quorum import PartIterator, QuorumEngine
from tfdist.engines.threads import ThreadedEngine
from tfdist.policies import Outcome
from tfdist.policies.saved_state import SavedState
from tfdist.strategies.distribution import Distribution
from tfdist.telemetry.recorder import Recorder

pytestmark = pytest.mark.devices

ROOT = pathlib.Path(engines.__file__).parent
MEMBERS = [name for name in (*vars(SavedState), *vars(Engine)) if not name.startswith("_")]


def _engines() -> list[type]:
    """Classes of the package that are named as engines."""
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in sorted(ROOT.rglob("*.py"))]
    found = [importlib.import_module(f"tfdist.engines.{name}") for name in modules if not name.endswith("__init__")]
    classes = [each for module in found for each in vars(module).values() if inspect.isclass(each)]
    return list(dict.fromkeys(each for each in classes if each.__name__.endswith("Engine") and each is not Engine))


@pytest.mark.parametrize("engine", _engines())
def test_engine_has_the_members_of_the_protocol(engine: type):
    assert issubclass(engine, Engine)
    assert not inspect.isabstract(engine)
    for name in MEMBERS:
        wanted, found = getattr(Engine, name), getattr(engine, name)
        assert isinstance(found, property) == isinstance(wanted, property), name
        if not isinstance(found, property):
            assert list(inspect.signature(found).parameters) == list(inspect.signature(wanted).parameters), name


def test_every_engine_is_found():
    kinds = ("Round", "Stream", "Averaging", "Asynchronous", "Quorum", "Synchronous", "Threaded", "Warmup")
    assert {each.__name__ for each in _engines()} == {f"{kind}Engine" for kind in kinds}


def _names_of_threads() -> set[str]:
    return {thread.name for thread in threading.enumerate()}


class _Client:
    """Stands for the connection to a quorum server."""

    def waited_for(self) -> str:
        return "nobody"

    def close(self) -> None:
        """There is no connection."""


def _threaded() -> Any:
    policy = tfdist.BackupWorkers(spares=1)
    policy.begin(2, "MirroredStrategy")
    engine = ThreadedEngine(_Client(), policy, ["a", "b"], lambda update, count: None, 60.0)  # pyright: ignore
    engine._start()
    return engine


def _quorum() -> Any:
    nothing = lambda *given: None  # noqa: E731
    engine = QuorumEngine(None, 0, _Client(), nothing, nothing, nothing, nothing, None)  # pyright: ignore
    engine.start()
    return engine


@pytest.mark.parametrize("start", [_threaded, _quorum])
def test_close_ends_threads_and_may_be_called_again(start: Any):
    before = _names_of_threads()
    engine = start()
    assert _names_of_threads() > before
    engine.barrier()
    for _ in range(2):
        engine.close()
        assert _names_of_threads() == before


def test_gradient_dropped_after_a_verdict_counts_with_the_next():
    engine = _quorum()
    engine.close()

    def counted(step: int, workers: tuple[int, ...], dropped: tuple[int, ...]) -> list[tuple[float, Outcome]]:
        verdict = Verdict(Kind.UPDATE, step, workers, dropped=dropped)
        return [(each.start, each.outcome) for each in engine._own_gradients(verdict)]

    engine._computed = [(0, 0.0, 1.0, 0.0), (1, 1.0, 2.0, 0.0)]
    # Rows beyond the verdict's would hide those of the workers that it names from the report.
    assert counted(1, (1, 2), ()) == []
    engine._computed.append((2, 2.0, 3.0, 0.0))
    assert counted(2, (0, 1), (0, 0)) == [(0.0, Outcome.DROPPED), (1.0, Outcome.DROPPED), (2.0, Outcome.ACCEPTED)]


class _Own(Engine):
    """An engine that notes what it is asked for."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def open(self, dataset: Any, fit: Any) -> None:
        """Nothing is read."""

    def run(self, step: Any, handle: Any) -> None:
        """Nothing is run."""

    def barrier(self, writes: bool = False) -> None:
        self.calls.append(f"barrier {writes}")

    def close(self) -> None:
        self.calls.append("close")


def test_distribution_reaches_all_engines_of_a_strategy():
    distribution, own = Distribution(Recorder([])), [_Own(), _Own()]
    distribution.take([], own[0], None, own[1])
    distribution.barrier(writes=True)
    distribution.saved_state.synchronize()
    distribution.close()
    assert [each.calls for each in own] == [["barrier True", "barrier False", "close"]] * 2
    assert distribution.saved_state.is_synchronized and not distribution.saved_state.is_chief_ahead


class StandIn:
    """Stands for an engine."""


def unreadable() -> Iterator[Any]:
    raise AssertionError("a batch was read")
    yield


@pytest.mark.parametrize(("left", "given"), [(3, 3), (tf.data.INFINITE_CARDINALITY, 10)])
def test_iterator_gives_handles_without_reading(left: int, given: int):
    engine, numbers = StandIn(), itertools.count(7)
    unused, iterator = (PartIterator(engine, numbers, unreadable(), tf.TensorSpec([None]), left) for _ in range(2))
    handles = [handle for _, handle in zip(range(10), iterator, strict=False)]
    assert len(handles) == given
    # Keras makes iterators that it never uses.
    assert (unused.number, iterator.number) == (0, 7)
    assert all(handle.engine is engine and handle.of is iterator for handle in handles)
