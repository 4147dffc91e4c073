# SPDX-License-Identifier: Apache-2.0
"""Promises that each gradient transform keeps, as a class of tests to derive from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist import transforms
from tfdist.transforms import GradientTransform, Info

_SHAPES = ((3, 4), (4,), (2, 2, 3, 5), ())
_ROWS = (6, 3)


class TransformTests:
    """Tests of `transform`.

    Attributes:
      transform: a `tfdist.transforms.GradientTransform`.
      info: facts about the gradients that it is given.
    """

    transform: GradientTransform
    info = Info(step=3, staleness=2, weight=0.5, contributors=2, examples=8, replica=1)

    def test_gradients_keep_their_kind(self) -> None:
        given = _gradients()
        found, _ = self._update(given, self._state(given))
        assert len(found) == len(given)
        for before, after in zip(given, found, strict=True):
            assert after.dtype == before.dtype
            assert tf.TensorShape(_shape(before)).is_compatible_with(_shape(after))

    def test_state_keeps_its_kind(self) -> None:
        given = _gradients()
        state = self._state(given)
        _, after = self._update(given, state)
        tf.nest.assert_same_structure(state, after)
        for old, new in zip(tf.nest.flatten(state), tf.nest.flatten(after), strict=True):
            assert (tf.convert_to_tensor(old).shape, old.dtype) == (tf.convert_to_tensor(new).shape, new.dtype)

    def test_same_state_and_gradients_give_the_same(self) -> None:
        given = _gradients()
        state = self._state(given)
        _assert_equal(self._update(given, state), self._update(given, state))

    def test_graph_computes_what_is_computed_eagerly(self) -> None:
        given = _gradients()
        state = self._state(given)
        traced = tf.function(lambda: self.transform.update(given, state, self.info), autograph=False)
        _assert_equal(self._update(given, state), traced(), within=1e-6)

    def test_float16_gradients_stay_float16(self) -> None:
        given = [tf.cast(each, tf.float16) for each in _gradients(with_rows=False)]
        found, _ = self._update(given, self._state(given))
        assert {each.dtype for each in found} == {tf.float16}

    def test_chain_with_identity_changes_nothing(self) -> None:
        given = _gradients()
        expected = self._update(given, self._state(given))[0]
        chained = transforms.chain(self.transform, transforms.identity(self.transform.where))
        found, _ = chained.update(given, chained.init(_variables(given)), self.info)
        _assert_equal(found, expected)

    def _state(self, given: Sequence[Any]) -> Any:
        return self.transform.init(_variables(given))

    def _update(self, given: Sequence[Any], state: Any) -> Any:
        return self.transform.update(list(given), state, self.info)


def _gradients(with_rows: bool = True) -> list[Any]:
    rng = np.random.default_rng(0)
    dense: list[Any] = [tf.constant(rng.standard_normal(shape), tf.float32) for shape in _SHAPES]
    values = tf.constant(rng.standard_normal((4, _ROWS[1])), tf.float32)
    rows = tf.IndexedSlices(values, tf.constant([0, 5, 5, 2]), tf.constant(_ROWS))
    return [*dense, rows] if with_rows else dense


def _variables(gradients: Sequence[Any]) -> list[tf.Variable]:
    return [tf.Variable(tf.zeros(_shape(each), each.dtype)) for each in gradients]


def _shape(gradient: Any) -> Any:
    return _ROWS if isinstance(gradient, tf.IndexedSlices) else gradient.shape


def _assert_equal(one: Any, other: Any, within: float = 0.0) -> None:
    pairs = zip(*(tf.nest.flatten(each, expand_composites=True) for each in (one, other)), strict=True)
    for first, second in pairs:
        np.testing.assert_allclose(np.asarray(first), np.asarray(second), rtol=within, atol=within)
