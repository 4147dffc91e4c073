# SPDX-License-Identifier: Apache-2.0
"""Slow, dying and failing workers in a run with spares."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from aggregated_cluster import NUM_WORKERS, Examples, Straggler, compiled, leaves_nothing_behind  # noqa: F401
from parameter_server_cluster import X, Y
from training import Logs

import tfdist
from tfdist.coordination import round_runner
from tfdist.engines import rounds

LAST = NUM_WORKERS - 1


def wide() -> keras.Model:
    """A model whose gradients are too large to be sent before the policy accepts them."""
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(6000, "relu"), keras.layers.Dense(1)])


def at_next_push(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> list[int]:
    """Calls a function when the last worker next sends a gradient; returns a list that is empty from then on."""
    arrive, waiting = round_runner.RoundRunner.arrive, [LAST]

    def arriving(self: Any, replica: int, *args: Any) -> bool:
        is_sent = arrive(self, replica, *args)
        if is_sent and replica in waiting:
            waiting.pop()
            act()
        return is_sent

    monkeypatch.setattr(round_runner.RoundRunner, "arrive", arriving)
    return waiting


def fit(model: Any, *callbacks: Any, epochs: int = 1) -> dict[str, list[float]]:
    # 12 batches of 16: each worker has 4 examples of each.
    return model.fit(X[:192], Y[:192], batch_size=16, epochs=epochs, verbose=0, callbacks=list(callbacks)).history


def test_a_straggler_holds_up_nobody_and_leaves_no_trace(
    with_spares: Callable[[int], Any], straggler: Straggler, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy = with_spares(1)
    prepare, pushed = rounds.RoundStep, []

    def preparing(*given: Any, **named: Any) -> rounds.RoundStep:
        step = prepare(*given, **named)
        push = step.push
        step.push = lambda *contribution: (pushed.append(contribution), push(*contribution))[1]
        return step

    monkeypatch.setattr(rounds, "RoundStep", preparing)
    before = strategy.report()
    with strategy.scope():
        metrics = [Examples()]
    model = compiled(strategy, wide, metrics=metrics)
    logs = Logs()
    history = fit(model, logs)
    assert straggler.held.is_set()
    # Three of four workers counted in each of 12 updates, with 4 examples each.
    assert history["examples"] == [144.0]
    assert [batch["examples"] for batch in logs.batches] == [12.0 * (index + 1) for index in range(12)]
    assert int(model.optimizer.iterations.numpy()) == 12
    between = strategy.report()
    assert between.accepted[f"worker:{LAST}"] == before.accepted[f"worker:{LAST}"]
    weights = model.get_weights()
    straggler.release()
    # It is dropped when it comes, takes part again, and meanwhile has changed nothing.
    for one, other in zip(weights, model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    worker, epochs, after = f"worker:{LAST}", 1, between
    while not (after.dropped[worker] > between.dropped[worker] and after.accepted[worker] > between.accepted[worker]):
        fit(model)
        epochs, after = epochs + 1, strategy.report()
        assert epochs < 20
    assert after.updates - before.updates == epochs * 12
    assert sum(after.accepted.values()) - sum(before.accepted.values()) == epochs * 12 * 3
    # A large gradient that is dropped does not cross the network.
    assert len(pushed) == epochs * 12 * 3


def test_a_worker_killed_while_it_pushes_is_not_counted(
    with_spares: Callable[[int], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy = with_spares(1)
    model = compiled(strategy, wide, metrics=None)
    waiting = at_next_push(monkeypatch, lambda: tfdist.testing.kill(strategy, f"worker:{LAST}"))
    before = strategy.report()
    losses = fit(model, epochs=2)["loss"]
    assert not waiting
    assert int(model.optimizer.iterations.numpy()) == 24
    after = strategy.report()
    assert sum(after.accepted.values()) - sum(before.accepted.values()) == 3 * 24
    assert losses[-1] < losses[0]


def test_a_gradient_that_is_not_delivered_is_given_up(
    with_spares: Callable[[int], Any], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    """A worker that is stopped in the middle of a push, neither dead nor alive."""
    strategy = with_spares(1)
    model = compiled(strategy, wide)
    # What is traced later is made known to all tasks, and that waits for one that is stopped; so does forgetting the
    # functions of models that earlier checks have left.
    fit(model)
    gc.collect()
    gc.disable()
    monkeypatch.setattr(round_runner, "_DELIVERY_SECS", 0.5)
    with tf.device(f"/job:worker/replica:0/task:{LAST}"):
        held = [tf.random.uniform(())]

    def stop() -> None:
        tfdist.testing.stop_task(strategy, f"worker:{LAST}")
        # To free a tensor of the worker is a call to it, for which none of the other workers may wait.
        held.clear()

    waiting = at_next_push(monkeypatch, stop)
    try:
        fit(model)
    finally:
        tfdist.testing.continue_task(strategy, f"worker:{LAST}")
        gc.enable()
    assert not waiting
    assert int(model.optimizer.iterations.numpy()) == 2 * 12
    assert f"a gradient of worker:{LAST} was not delivered" in capfd.readouterr().err
