# SPDX-License-Identifier: Apache-2.0
"""Gradient transforms by themselves, without a strategy: formulas, composition, and arguments."""

from __future__ import annotations

import pathlib
import re
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from transform_tests import TransformTests

import tfdist
from tfdist.policies import composition
from tfdist.transforms import PLACES, GradientTransform, Info

T = tfdist.transforms
pytestmark = pytest.mark.devices

READY = {
    "identity": T.identity(),
    "clip_by_global_norm": T.clip_by_global_norm(1.0),
    "clip_stale": T.clip_stale(1.0, staleness=2),
    "add_noise": T.add_noise(0.1, decay=0.55),
    "centralize": T.centralize(),
    "skip_nonfinite": T.skip_nonfinite(),
    "momentum_correction": T.momentum_correction(),
    "momentum_correction, nesterov": T.momentum_correction(nesterov=True),
    "chain": T.chain(T.skip_nonfinite(), T.centralize(), T.add_noise(0.1)),
}


@pytest.mark.parametrize("transform", READY.values(), ids=READY, scope="class")
class TestReadyOnes(TransformTests):
    @pytest.fixture(autouse=True)
    def give(self, transform: GradientTransform) -> None:
        self.transform = transform


def update(transform: GradientTransform, gradients: list[Any], state: Any = None, **info: Any) -> tuple[Any, Any]:
    state = transform.init(gradients) if state is None else state
    return transform.update(gradients, state, Info(**info))


GRADIENTS = [tf.constant([[3.0, 0.0], [0.0, 0.0]]), tf.constant([0.0, 4.0])]


def test_clipping_bounds_the_norm_of_all_gradients_together():
    found, _ = update(T.clip_by_global_norm(1.0), GRADIENTS)
    np.testing.assert_allclose(found[0], [[0.6, 0.0], [0.0, 0.0]], rtol=1e-6)
    np.testing.assert_allclose(found[1], [0.0, 0.8], rtol=1e-6)
    (same,), _ = update(T.clip_by_global_norm(float("inf")), GRADIENTS[:1])
    np.testing.assert_array_equal(same, GRADIENTS[0])


@pytest.mark.parametrize(("staleness", "norm"), [(0, 5.0), (1, 5.0), (2, 1.0), (7, 1.0)])
def test_stale_gradients_alone_are_clipped(staleness: int, norm: float):
    found, _ = update(T.clip_stale(1.0, staleness=2), GRADIENTS, staleness=staleness)
    assert float(T.global_norm(found)) == pytest.approx(norm, rel=1e-6)
    traced = tf.function(lambda age: T.global_norm(update(T.clip_stale(1.0, 2), GRADIENTS, staleness=age)[0]))
    assert float(traced(tf.constant(staleness))) == pytest.approx(norm, rel=1e-6)


def test_noise_depends_on_step_seed_replica_and_place():
    zeros = [tf.zeros([200]), tf.zeros([200])]
    noise = {
        (seed, step, replica): update(T.add_noise(2.0, seed=seed), zeros, step=step, replica=replica)[0]
        for seed, step, replica in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]
    }
    parts = [np.asarray(each) for found in noise.values() for each in found]
    assert len({part.tobytes() for part in parts}) == len(parts)
    assert np.std(np.concatenate(parts)) == pytest.approx(2.0, rel=0.1)
    later, _ = update(T.add_noise(2.0, decay=0.55), zeros, step=99)
    assert np.std(np.concatenate(later)) == pytest.approx(2.0 / 100**0.275, rel=0.15)


def test_centralized_kernels_have_mean_zero_for_each_output():
    kernel = tf.constant(np.random.default_rng(0).normal(size=(3, 3, 4, 5)), tf.float32)
    (found, bias), _ = update(T.centralize(), [kernel, GRADIENTS[1]])
    np.testing.assert_allclose(tf.reduce_mean(found, [0, 1, 2]), np.zeros(5), atol=1e-6)
    np.testing.assert_allclose(found, kernel - np.mean(kernel, (0, 1, 2)), atol=1e-6)
    np.testing.assert_array_equal(bias, GRADIENTS[1])


def test_nonfinite_gradients_are_zeros_and_counted():
    found, count = update(T.skip_nonfinite(), [GRADIENTS[0], tf.constant([np.inf, 1.0])])
    assert int(count) == 1
    assert not any(np.any(each) for each in found)
    found, count = update(T.skip_nonfinite(), GRADIENTS, count)
    assert int(count) == 1
    np.testing.assert_array_equal(found[0], GRADIENTS[0])


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_is_that_of_sgd(nesterov: bool):
    transform, state, sent = T.momentum_correction(0.5, nesterov), None, []
    for value in (1.0, 2.0, 0.0):
        (found,), state = update(transform, [tf.constant([value])], state)
        sent.append(float(found[0]))
    velocities = [1.0, 2.5, 1.25]
    nexts = [0.5 * u + g for u, g in zip(velocities, (1.0, 2.0, 0.0), strict=True)]
    assert sent == (nexts if nesterov else velocities)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from(sorted(READY)), min_size=3, max_size=3), st.integers(0, 3), st.integers(0, 100))
def test_composition_is_associative(names: list[str], staleness: int, seed: int):
    first, second, third = (GradientTransform(READY[n].init, READY[n].update, name=n) for n in names)
    given_ = [tf.constant(np.random.default_rng(seed).normal(size=shape), tf.float32) for shape in ((2, 3), (3,))]
    left, right = T.chain(T.chain(first, second), third), T.chain(first, T.chain(second, third))
    states = [left.init(given_), right.init(given_)]
    for step in range(2):
        found = [
            update(t, given_, s, step=step, staleness=staleness) for t, s in zip((left, right), states, strict=True)
        ]
        states = [state for _, state in found]
        for one, other in zip(found[0][0], found[1][0], strict=True):
            np.testing.assert_array_equal(one, other)
        for one, other in zip(*(tf.nest.flatten(state) for state in states), strict=True):
            np.testing.assert_array_equal(one, other)


def test_rows_of_a_table_keep_their_indices():
    rows = tf.IndexedSlices(tf.constant([[3.0, 0.0], [0.0, 4.0]]), tf.constant([5, 2]), tf.constant([9, 2]))
    (found,), _ = update(T.clip_by_global_norm(1.0), [rows])
    np.testing.assert_allclose(found.values, [[0.6, 0.0], [0.0, 0.8]], rtol=1e-6)
    np.testing.assert_array_equal(found.indices, rows.indices)


def test_facts_are_found_when_they_are_used():
    info = Info(step=lambda: pytest.fail("it was not used"), staleness=lambda: 3)
    assert int(info.staleness) == 3
    assert info.examples is None
    with pytest.raises(AttributeError, match="no attribute 'age'"):
        info.age  # noqa: B018


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GradientTransform(where="worker"), r'"replica", "arrival" or "update"\. Received: where=\'worker\''),
        (lambda: GradientTransform(update=None), r"update=\.\.\.\) must be a function\. Received: update=None"),  # type: ignore[arg-type]
        (lambda: T.clip_by_global_norm(0), r"clip_by_global_norm\(max_norm=\.\.\.\).*Received: max_norm=0"),
        (lambda: T.clip_stale(1.0, staleness=0), r"clip_stale\(staleness=\.\.\.\).*Received: staleness=0"),
        (lambda: T.add_noise(-1.0), r"add_noise\(stddev=\.\.\.\).*Received: stddev=-1\.0"),
        (lambda: T.momentum_correction(1.0), r"must be in \[0, 1\)\. Received: momentum=1\.0"),
        (lambda: T.chain(), "Received: none"),
        (lambda: T.chain(T.identity("replica"), T.identity()), r"one place.*\(replica\), .*\(update\)"),
        (lambda: tfdist.MirroredStrategy(transforms=T.identity()), "transforms must be a list of tfdist.transforms"),
        (lambda: tfdist.MirroredStrategy(transforms=[T.identity]), "transforms must be a list of tfdist.transforms"),
    ],
)
def test_bad_arguments_are_refused_by_name(make: Any, message: str):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("policy", [tfdist.Warmup(steps=5), tfdist.ParameterAveraging(6)], ids=repr)
@pytest.mark.parametrize("strategy", ["MirroredStrategy", "MultiWorkerMirroredStrategy"])
def test_policies_that_gradients_cannot_be_transformed_beside(policy: Any, strategy: str):
    with pytest.raises(
        ValueError, match=rf"{type(policy).__name__}.* and transforms don't go together under {strategy}"
    ):
        composition.check_policies([policy], strategy, [T.identity()])
    composition.check_policies([policy], strategy)


def test_they_run_in_the_order_of_places_and_of_the_list():
    given_ = [T.identity(where) for where in ("update", "replica", "arrival", "replica")]
    in_order = T.in_order(given_)
    assert [each.where for each in in_order] == [PLACES[0], PLACES[0], PLACES[1], PLACES[2]]
    assert in_order[0] is given_[1]
    assert in_order[1] is given_[3]


def test_page_lists_all_ready_ones():
    page = (pathlib.Path(__file__).parents[2] / "docs" / "transforms.md").read_text()
    rows = re.findall(r"^\| `(\w+)\(.*?\)` \| (\w+) \|", page, re.MULTILINE)
    ready = {"identity": T.identity(), **{name: READY[name] for name in READY if "," not in name and name != "chain"}}
    assert dict(rows) == {name: each.where for name, each in ready.items()}
