# SPDX-License-Identifier: Apache-2.0
"""Makes the initial value of a variable in shards shard by shard, with the values that the whole would have.

There is no public way: Keras gives TensorFlow a function without arguments for the initial value, of no known shape, so
that TensorFlow makes the whole value once for each shard, and cuts. Nor can a random initializer of Keras begin in the
middle. TensorFlow's stateless generator can: it is counter-based (Philox; Salmon et al. 2011, "Parallel Random
Numbers: As Easy as 1, 2, 3"), so the n-th group of numbers follows from key and counter + n. While an initializer of
Keras runs, its backend's draws are replaced by those of the shard's rows. The first change is permanent and only notes
which initializer is used; the second ends with the call.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src import backend

from tfdist.compat import optimizer_patches, replacing

NEEDS = (
    "keras:Variable._initialize_with_initializer",
    "keras:Variable._dtype",
    "keras:Variable._shape",
    "keras.src.backend.tensorflow.random:normal",
    "keras.src.backend.tensorflow.random:truncated_normal",
    "keras.src.backend.tensorflow.random:uniform",
    "keras.src.backend.tensorflow.random:_cast_seed",
)

# Initializers that look at the shape alone.
_CONSTANTS = (keras.initializers.Zeros, keras.initializers.Ones, keras.initializers.Constant)
# Initializers whose elements are one draw each; classes that derive from these and call anything else are not meant.
_DRAWN = tuple(
    getattr(keras.initializers, name).__call__
    for name in ("RandomUniform", "RandomNormal", "TruncatedNormal", "VarianceScaling")
)
# Numbers that one value of the counter gives, of float32; how far a group of numbers of each draw advances the counter.
_GROUP = 4
_ADVANCE = {"uniform": 1, "normal": 1, "truncated_normal": 256}
_DRAWS: dict[str, Callable[..., tf.Tensor]] = {
    "uniform": tf.raw_ops.StatelessRandomUniformV2,
    "normal": tf.raw_ops.StatelessRandomNormalV2,
    "truncated_normal": tf.raw_ops.StatelessTruncatedNormalV2,
}
_PHILOX = 1
# Shards above this size are drawn in parts.
LARGE_BYTES = 64 << 20
_lock = threading.RLock()


# A variable may be made in a thread of its own (`fresh_threads`).
_making: contextvars.ContextVar[ShardInitial | None] = contextvars.ContextVar("tfdist_initial", default=None)


class ShardInitial:
    """The initial value of a variable that may be in shards, in the form that TensorFlow asks for.

    Args:
      initializer: a Keras initializer.
      shape: of the whole.
      dtype: of the variable.
      path: name of the variable, with that of its layer.
    """

    def __init__(self, initializer: Any, shape: Sequence[int], dtype: str, path: str = "") -> None:
        self.shape = tuple(shape)
        self.path = path
        self._initializer = initializer
        self.dtype = dtype
        # True if the shards begin as zeros, and get their values from `rows`.
        self.is_postponed = False
        # What is drawn as a seed for the first shard holds for all.
        self._seed: tf.Tensor | None = None

    def __call__(
        self, partition_shape: Sequence[int] | None = None, partition_offset: Sequence[int] | None = None
    ) -> tf.Tensor:
        """Returns the whole, or a shard: rows partition_offset[0] to partition_offset[0] + partition_shape[0]."""
        if partition_shape is None or partition_offset is None:
            return self._initializer(self.shape, dtype=self.dtype)
        part = tuple(partition_shape)
        first = partition_offset[0]
        is_drawn = self.dtype == "float32" and type(self._initializer).__call__ in _DRAWN
        if not is_drawn and not isinstance(self._initializer, _CONSTANTS):
            return self._initializer(self.shape, dtype=self.dtype)[first : first + part[0]]
        if math.prod(part) * tf.as_dtype(self.dtype).size > LARGE_BYTES:
            # A draw takes three times its memory for a moment, a constant twice.
            self.is_postponed = True
            return tf.zeros(part, self.dtype)
        return self.rows(first, first + part[0])

    def rows(self, first: int, last: int) -> tf.Tensor:
        """Returns rows first to last - 1 of the whole."""
        part = (last - first, *self.shape[1:])
        if isinstance(self._initializer, _CONSTANTS):
            return self._initializer(part, dtype=self.dtype)
        with _lock, optimizer_patches.attributes([self._drawing(name, first, part) for name in _DRAWS]):
            return self._initializer(self.shape, dtype=self.dtype)

    def _drawing(self, name: str, first: int, part: tuple[int, ...]) -> tuple[Any, str, Any]:
        module: Any = backend.random

        def draw(shape: Any, *limits: Any, dtype: Any = None, seed: Any = None, **named: Any) -> tf.Tensor:
            del shape, dtype
            if self._seed is None:
                self._seed = module._cast_seed(module.draw_seed(seed))
            numbers = _numbers(name, self._seed, first * math.prod(part[1:]), part)
            low, high = *limits, *named.values()
            return numbers * (high - low) + low if name == "uniform" else numbers * high + low

        return module, name, draw


def install() -> None:
    """Notes for each Keras variable that is made which initializer it begins with."""
    replacing.once(keras.Variable, "_initialize_with_initializer", _noting)


def present() -> ShardInitial | None:
    """The initial value of the Keras variable that is being made."""
    return _making.get()


def _noting(original: Any) -> Any:
    def initialize(variable: Any, initializer: Any) -> None:
        with _made(ShardInitial(initializer, variable._shape, variable._dtype, variable.path)):
            original(variable, initializer)

    return initialize


@contextlib.contextmanager
def _made(initial: ShardInitial) -> Iterator[None]:
    before = _making.set(initial)
    try:
        yield
    finally:
        _making.reset(before)


def _numbers(name: str, seed: tf.Tensor, first: int, part: tuple[int, ...]) -> tf.Tensor:
    """Returns the numbers first to first + prod(part) of a draw, float32, in the shape `part`."""
    group, begun = divmod(first, _GROUP)
    found = tf.raw_ops.StatelessRandomGetKeyCounter(seed=seed)
    # 128 bits in two words; the low one does not overflow, because it begins below 2**33.
    counter = found.counter + tf.constant([group * _ADVANCE[name], 0], tf.uint64)
    count = math.prod(part)
    numbers = _DRAWS[name](shape=[begun + count], key=found.key, counter=counter, alg=_PHILOX, dtype=tf.float32)
    return tf.reshape(numbers[begun:], part)
