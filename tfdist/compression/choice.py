# SPDX-License-Identifier: Apache-2.0
"""Chooses a codec once, before the first step of a model: `Compression("auto")`.

All codecs leave the forward and backward pass as they are, so what they cost and save is the time of the exchange. Two
sums between the workers are measured, and each codec is computed from them:

    latency    = secs of a sum of 4 numbers
    bandwidth  = bytes of the gradients / (secs of their sum as they are - latency)
    secs       = secs to encode and decode on this worker + messages * latency + bytes of the messages / bandwidth

The gradients are made up, equal on all workers. Those of matrices are of a dense layer and a batch of 32 examples, so
they have rank 32; other tensors get random numbers.

The error of an update is the share ||residual||^2 / ||x||^2 that a codec leaves for later. x is the gradient with the
residual of earlier steps. With a share below 1, error feedback converges as SGD does, after a delay that grows with 1 /
(1 - share) (Stich, Cordonnier and Jaggi 2018, Sparsified SGD with memory, arXiv 1809.07599, theorem 2.4; Karimireddy et
al. 2019, arXiv 1901.09847).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from tfdist.compression.codec import Codec
from tfdist.compression.half_precision import HalfPrecision
from tfdist.compression.power_sgd import PowerSGD
from tfdist.compression.sign_sgd import SignSGD
from tfdist.compression.threshold import Threshold

CANDIDATES: tuple[Codec, ...] = (HalfPrecision("bfloat16"), PowerSGD(4), SignSGD(), Threshold())
# An exchange must become this many times faster: a codec costs memory, and most leave something for later.
LEAST_GAIN = 1.25
# And save so much: shorter exchanges differ by as much from one to the next on a busy machine.
LEAST_SAVED_SECS = 5e-3
# Sums of each size that are measured, of which the fastest counts.
_SUMS = 8
# Of 100 Mbit/s. What takes longer beyond the latency is noise, such as a busy machine's in a sum of few values.
_LEAST_BYTES_PER_SEC = 12.5e6
# Steps after which an adaptive threshold and a power iteration have settled.
_SETTLING_STEPS = 8
_RANK = 32

Gradients = Sequence[tf.Tensor]


def choose(
    gradients: Gradients,
    sum_all: Callable[[Gradients], Gradients],
    senders: Sequence[str],
    slowest: Callable[[float], float],
    error_bound: float,
) -> tuple[Codec | None, str]:
    """Chooses the fastest candidate whose error is within the bound; all workers call it alike.

    Args:
      gradients: float32, with static shapes; see `made_up`.
      sum_all: sums gradients over the workers as they are.
      senders: name of each worker.
      slowest: returns the largest of all workers' numbers.
      error_bound: largest share of the squared norm that an update may leave for later.

    Returns:
      The codec, None to send gradients as they are; and the reason, one line for the user.
    """
    size = sum(each.shape.num_elements() for each in gradients)
    latency, plain = (_secs(lambda given=given: sum_all(given), slowest) for given in ([tf.zeros([4])], gradients))
    sent_plain = _Counted(senders).add_sum(4 * size) or 1.0
    secs_per_byte = min(max(plain - latency, 0.0) / sent_plain, 1 / _LEAST_BYTES_PER_SEC)
    expected = latency + sent_plain * secs_per_byte
    found: list[tuple[float, Codec]] = []
    excluded: list[str] = []
    for codec in CANDIDATES:
        transport = _Counted(senders)
        local, error = _alone(codec, gradients, transport)
        messages, sent = transport.messages / _SETTLING_STEPS, transport.sent / _SETTLING_STEPS
        # Counts and logs are sent with gradients as they are; beside a codec they need a sum of their own.
        secs = local + (messages + 1) * latency + sent * secs_per_byte
        # All workers choose alike, also where rounding differs between processors.
        secs, error = slowest(secs), slowest(error)
        if error > error_bound:
            excluded.append(f"{codec!r} leaves {error:.1%} for later")
        else:
            found.append((secs, codec))
    as_it_is = f"a sum of {size:,} values takes {_shown(plain)} as they are"
    beyond = f"; beyond error_bound={error_bound:g}: {', '.join(excluded)}" if excluded else ""
    if not found:
        return None, f"none: {as_it_is}{beyond}"
    secs, fastest = min(found, key=lambda each: each[0])
    if expected < LEAST_GAIN * secs or expected - secs < LEAST_SAVED_SECS:
        return None, f"none: {as_it_is}; with the fastest codec, {fastest!r}, about {_shown(secs)}{beyond}"
    return fastest, f"{fastest!r}: {as_it_is}; with it about {_shown(secs)}{beyond}"


def made_up(shapes: Sequence[Sequence[int]]) -> list[tf.Tensor]:
    """Returns gradients of these shapes, equal on all workers; see above."""
    random = np.random.default_rng(0)

    def made(shape: Sequence[int]) -> np.ndarray:
        if len(shape) < 2:
            return random.standard_normal(shape, np.float32)
        rows, columns = int(np.prod(shape[:-1])), shape[-1]
        factors = [random.standard_normal((count, _RANK), np.float32) for count in (rows, columns)]
        return (factors[0] @ factors[1].T).reshape(shape)

    return [tf.constant(made(shape)) for shape in shapes]


class _Counted:
    """Transport that sends nothing, and counts what a worker would send; all workers have the same messages.

    Args:
      senders: name of each worker.

    Attributes:
      messages: number of sums and gathers.
      sent: bytes.
    """

    def __init__(self, senders: Sequence[str]) -> None:
        self.senders, self.num_workers = senders, len(senders)
        self.messages, self.sent = 0, 0.0

    def add_sum(self, size: int) -> float:
        """Adds a sum of so many bytes around a ring; returns the bytes of all messages so far."""
        self.messages += 1
        # Patarasuk and Yuan, 2009.
        self.sent += 2 * (self.num_workers - 1) / self.num_workers * size
        return self.sent

    def sum(self, flat: tf.Tensor) -> tf.Tensor:
        self.add_sum(flat.dtype.size * int(tf.size(flat)))
        return flat

    def gather(self, message: tf.Tensor) -> tf.Tensor:
        self.messages += 1
        self.sent += (self.num_workers - 1) * int(tf.size(message))
        return tf.tile(message[tf.newaxis], [self.num_workers, 1])


def _alone(codec: Codec, gradients: Gradients, transport: _Counted) -> tuple[float, float]:
    """Returns the seconds of a step of the codec on this worker, and its error in the last of several steps."""
    state = codec.init([tf.TensorSpec(each.shape, each.dtype) for each in gradients])
    wanted: Gradients = gradients
    secs: list[float] = []
    for _ in range(_SETTLING_STEPS):
        residuals = [state.get(f"residual/{index}", tf.zeros([])) for index in range(len(gradients))]
        wanted = [gradient + kept for gradient, kept in zip(gradients, residuals, strict=True)]
        began = time.perf_counter()
        sums, state = codec.exchange(gradients, state, transport)
        for each in sums:
            each.numpy()
        secs.append(time.perf_counter() - began)
    whole = sum(float(tf.reduce_sum(tf.square(each))) for each in wanted)
    left = sum(float(tf.reduce_sum(tf.square(value))) for name, value in state.items() if name.startswith("residual/"))
    return min(secs), left / whole if whole else 0.0


def _secs(call: Callable[[], Gradients], slowest: Callable[[float], float]) -> float:
    """Returns the least of the slowest worker's seconds; the first call, which traces, does not count."""
    # As in a step, where nothing of it is Python's.
    function = tf.function(lambda: [tf.reshape(each, [-1])[:1] for each in call()], autograph=False)

    def once() -> float:
        began = time.perf_counter()
        for each in function():
            each.numpy()
        return slowest(time.perf_counter() - began)

    return min([once() for _ in range(_SUMS + 1)][1:])


def _shown(secs: float) -> str:
    return f"{secs:.2f} s" if secs >= 1 else f"{secs * 1e3:.1f} ms"
