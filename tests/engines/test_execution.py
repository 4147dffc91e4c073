# SPDX-License-Identifier: Apache-2.0
"""Several steps in a closure (`steps_per_execution`), over workers made of threads: each batch is used exactly once."""

from __future__ import annotations

import collections
import contextlib
import types
from typing import Any

import pytest
import tensorflow as tf
from fake_cluster import Batch, FakeCluster, FakeDataset, FakeProgram, running_engine
from fake_passes import all_of
from hypothesis import given
from hypothesis import strategies as st

from tfdist.engines import step_queue
from tfdist.passes import worker_pass
from tfdist.passes.worker_pass import WorkerIterator
from tfdist.policies.base import Update

pytestmark = pytest.mark.timeout(60)


def run_pass(
    shares: list[int], per_execution: int, work: Any = lambda batch, cluster: None
) -> tuple[list[Batch], list[Update]]:
    """Drives a pass as Keras' loop does; returns the batches that steps were made of, and the updates."""
    updates: list[Update] = []
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        fit = types.SimpleNamespace(kind="fit", epochs=None)
        patch.setattr(worker_pass.calls, "current", lambda: fit)
        engine, cluster = stack.enter_context(running_engine(len(shares), on_update=updates.append))
        batches: list[Batch] = []

        def step(batch: Batch) -> int:
            work(batch, cluster)
            batches.append(batch)
            return len(batches)

        program = FakeProgram(cluster, step)
        iterator = WorkerIterator(engine, FakeDataset(cluster, shares), by_execution=True)
        handles = 0
        with contextlib.suppress(tf.errors.OutOfRangeError):
            while iterator.take_handle(per_execution) is not None:
                handles += 1
                is_last = iterator.is_last
                logs = engine.step(program, [], iterator.feed, is_last, is_update=True, count=iterator.count)
        assert int(logs[0]) == len(batches)
        assert handles == -(-sum(shares) // per_execution)
        engine.barrier()
    return batches, updates


@given(st.lists(st.integers(0, 9), min_size=1, max_size=4).filter(any), st.integers(1, 12))
def test_each_batch_is_used_once_however_many_make_an_execution(shares: list[int], per_execution: int) -> None:
    batches, updates = run_pass(shares, per_execution)
    assert sorted(batches) == all_of(shares)
    assert [update.step for update in updates] == list(range(1, sum(shares) + 1))


def test_staleness_of_an_update_is_what_the_servers_count(monkeypatch: pytest.MonkeyPatch) -> None:
    # Not the updates that the chief has seen since it handed out the step; between two fetches the last one stands.
    monkeypatch.setattr(FakeProgram, "staleness_in", lambda self, outputs: [7])
    updates = run_pass([3], 1)[1]
    assert [each.contributions[-1].staleness for each in updates] == [7, 7, 7]


def test_a_closure_of_a_lost_worker_is_made_again_and_nothing_else() -> None:
    failures = [tf.errors.UnavailableError(None, None, "worker is gone")]

    def work(batch: Batch, cluster: FakeCluster) -> None:
        if batch == Batch(0, 6) and failures:
            cluster.lives[0] += 1
            raise failures.pop()

    batches, updates = run_pass([12], 4, work)
    counts = collections.Counter(batches)
    assert sorted(counts) == [Batch(0, position) for position in range(12)]
    # Of the second execution two steps were made.
    assert [batch.position for batch, count in sorted(counts.items()) if count == 2] == [4, 5]
    assert len(updates) == 12


class Program:
    """Notes which calls are made."""

    accumulation = None

    def __init__(self, num_several: int) -> None:
        self.num_several = num_several
        self.calls: list[str] = []

    def run_several(self, *inputs: Any) -> list[int]:
        self.calls.append("several")
        return list(range(self.num_several))

    def run(self, *inputs: Any) -> str:
        self.calls.append("run")
        return "outputs"

    def run_silently(self, *inputs: Any) -> str:
        self.calls.append("silently")
        return "outputs"

    def fetch(self, outputs: str) -> list[str]:
        return [outputs]

    def batch_in(self, outputs: str) -> tuple[()]:
        return ()

    def staleness_in(self, outputs: str) -> list[int]:
        return [7]


@pytest.mark.parametrize(
    ("several", "count", "wants_values", "calls"),
    [
        (1, 3, True, ["silently", "silently", "run"]),
        (3, 4, True, ["several", "run"]),
        (3, 4, False, ["several", "silently"]),
        (3, 8, True, ["several", "several", "silently", "run"]),
        (3, 2, True, ["silently", "run"]),
        (3, 1, False, ["silently"]),
    ],
)
def test_as_many_steps_as_possible_are_made_in_one_call(
    several: int, count: int, wants_values: bool, calls: list[str]
) -> None:
    program: Any = Program(several)
    made = step_queue.make_steps(program, count, wants_values, [], None)
    assert program.calls == calls
    assert len(made.staleness) == count
    assert made.values == (["outputs"] if wants_values else None)
