# SPDX-License-Identifier: Apache-2.0
"""Gradient transforms under MirroredStrategy: what they are given, what they return, and their state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from training import X, Y, compiled

import tfdist
from tfdist.transforms import GradientTransform

T = tfdist.transforms
pytestmark = [pytest.mark.devices, pytest.mark.timeout(300)]
EACH = pytest.mark.parametrize(
    "policies",
    [list, pytest.param(lambda: [tfdist.BackupWorkers(0)], marks=pytest.mark.slow)],
    ids=["stock", "threads"],
)


def fit(
    transforms: list[Any], policies: Any = (), devices: int = 2, x: Any = X[:40], batch_size: int = 8, **options: Any
) -> tuple[Any, Any]:
    """A model that is compiled with these options after one epoch, and its strategy."""
    names = [f"CPU:{index}" for index in range(devices)]
    strategy = tfdist.MirroredStrategy(names, policies=policies, transforms=transforms)
    model = compiled(strategy, **{"metrics": None, **options})
    model.fit(x, Y[: len(x)], batch_size=batch_size, shuffle=False, verbose=0)
    return model, strategy


def noting(where: str) -> GradientTransform:
    """Keeps, in state, what each update is given, as numbers."""

    def update(gradients: Any, state: Any, info: Any) -> Any:
        facts = [info.step, info.staleness, info.weight, info.contributors, info.examples, T.global_norm(gradients)]
        return gradients, state + tf.stack([tf.cast(each, tf.float64) for each in facts])

    return GradientTransform(lambda variables: tf.zeros([6], tf.float64), update, where)


@EACH
def test_facts_are_those_of_replica_and_update(policies: Callable[[], Any]):
    model, strategy = fit([noting(where) for where in T.PLACES], policies())
    _, arrays = strategy.distribution.transforms.collect(model)
    first, arrival, update, *others = np.asarray(arrays)
    # Five updates of 8 examples, of which each replica has 4.
    np.testing.assert_array_equal(first[:5], [0 + 1 + 2 + 3 + 4, 0, 5, 10, 20])
    np.testing.assert_array_equal(arrival[:5], first[:5])
    np.testing.assert_array_equal(update[:5], [10, 0, 5, 10, 40])
    np.testing.assert_array_equal(others[2], update)
    # Gradients have the size of those of one device.
    assert 0.5 < first[5] / update[5] < 2


@EACH
def test_state_does_not_change_where_gradients_do_not_count(policies: Callable[[], Any]):
    # Of batches of one example one replica has none; of a step that overflows, no replica's gradient counts.
    data = X[:3].copy()
    data[1] = np.inf
    optimizer = lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))  # noqa: E731
    transforms = [T.momentum_correction(), noting("replica")]
    model, strategy = fit(transforms, policies(), x=data, batch_size=1, optimizer=optimizer)
    _, arrays = strategy.distribution.transforms.collect(model)
    halves = arrays[: len(arrays) // 2], arrays[len(arrays) // 2 :]
    none, some = sorted(halves, key=lambda half: half[-1][4])
    assert all(np.all(np.isfinite(each)) for each in arrays)
    assert any(np.any(each) for each in some)
    assert not any(np.any(each) for each in none)
    assert some[-1][4] == 2


@EACH
@pytest.mark.parametrize("where", [T.PLACES[0], *(pytest.param(each, marks=pytest.mark.slow) for each in T.PLACES[1:])])
def test_the_scale_of_losses_falls_where_a_transform_removes_what_is_not_finite(
    policies: Callable[[], Any], where: str
):
    data = X[:40].copy()
    data[9] = np.inf

    def scaled(transforms: list[Any]) -> Any:
        optimizer = lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), 64.0)  # noqa: E731
        model, _ = fit(transforms, policies(), optimizer=optimizer, x=data)
        assert float(model.optimizer.dynamic_scale) == 32.0
        return model.get_weights()

    for found, expected in zip(scaled([T.skip_nonfinite(where)]), scaled([]), strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.slow
def test_state_follows_a_change_of_replicas():
    model, strategy = fit([T.momentum_correction(0.5), T.skip_nonfinite("replica")])
    described, arrays = strategy.distribution.transforms.collect(model)
    more, other = fit([T.momentum_correction(0.5), T.skip_nonfinite("replica")], devices=3)
    other.distribution.transforms.distribute(more, described, arrays)
    _, found = other.distribution.transforms.collect(more)
    size = len(arrays) // 2
    for index in range(size):
        parts = [found[index], found[size + index], found[2 * size + index]]
        np.testing.assert_allclose(np.mean(parts, axis=0), np.mean([arrays[index], arrays[size + index]], axis=0), 1e-6)
        assert parts[0].dtype == arrays[index].dtype


def test_checkpoint_of_other_transforms_begins_anew(capfd: pytest.CaptureFixture):
    model, strategy = fit([T.momentum_correction(0.5)])
    described, arrays = strategy.distribution.transforms.collect(model)
    strategy.distribution.transforms.distribute(model, {**described, "transforms": ["other()"]}, arrays)
    assert "the checkpoint has the state of other variables, or of other transforms, other()" in capfd.readouterr().err
    assert not any(np.any(each) for each in strategy.distribution.transforms.collect(model)[1])


@pytest.mark.parametrize(
    ("update", "message"),
    [
        (lambda g, s, i: (g[1:], s), r"must return 4 gradients, one for each\. Received"),
        (lambda g, s, i: ([each[None] for each in g], s), r"must return a gradient of '.*kernel', float32\[3, 8\]"),
        (lambda g, s, i: ([tf.cast(each, tf.float64) for each in g], s), r"must return a gradient of '.*kernel'"),
        (lambda g, s, i: (g, tf.cast(s, tf.float64)), r"must return a state of TensorSpec"),
        (lambda g, s, i: (g, (s, s)), r"must return a state of the structure"),
    ],
)
def test_results_of_another_kind_are_refused_by_name(update: Any, message: str):
    own = GradientTransform(lambda variables: tf.constant([0.0]), update, name="own")
    with pytest.raises((ValueError, TypeError), match=message):
        fit([own])


def test_a_function_of_the_user_s_own_that_applies_gradients_is_refused():
    strategy = tfdist.MirroredStrategy(["CPU:0", "CPU:1"], transforms=[T.identity()])
    model = compiled(strategy)
    with strategy.scope():
        model.optimizer.build(model.trainable_variables)

    def own() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(X[:4]))
        model.optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    message = r"transforms: only the gradients of .* are transformed; .*Received: optimizer 'sgd.*', applied in own"
    with pytest.raises(ValueError, match=message):
        strategy.run(own)
    assert strategy.run(lambda: model(X[:4])) is not None


def test_local_momentum_is_that_of_sgd_where_replicas_have_equal_parts():
    found, _ = fit([T.momentum_correction(0.9)], optimizer=lambda: keras.optimizers.SGD(0.1))
    expected, _ = fit([], optimizer=lambda: keras.optimizers.SGD(0.1, momentum=0.9))
    for one, other in zip(found.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
