# SPDX-License-Identifier: Apache-2.0
"""Chooses a codec by measurement, once: `Compression("auto")`.

All codecs leave the forward and backward pass as they are, so what they cost and save is the time of the exchange. It
is measured with the real workers over the real network:

    first steps of `fit`                         --> seconds of a step, and its gradients
    sum of the gradients as they are             --> seconds
    each candidate: encode, exchange, decode     --> seconds, and the error of an update
    the slowest worker's seconds are compared        the same choice on all workers

Own loops and updates of another policy have no such steps first: there gradients are made up. Those of matrices are of
a dense layer and a batch of 32 examples, so they have rank 32; other tensors get random numbers.

The error of an update is the share ||x - sent||^2 / ||x||^2 that a codec leaves for later. x is the gradient with the
residual of earlier steps. With a share below 1, error feedback converges as SGD does, after a delay that grows with 1 /
(1 - share) (Stich, Cordonnier and Jaggi 2018, Sparsified SGD with memory, arXiv 1809.07599, theorem 2.4; Karimireddy et
al. 2019, arXiv 1901.09847).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.compression.codec import Codec, LocalTransport, State
from tfdist.compression.half_precision import HalfPrecision
from tfdist.compression.power_sgd import PowerSGD
from tfdist.compression.sign_sgd import SignSGD
from tfdist.compression.threshold import Threshold

CANDIDATES: tuple[Codec, ...] = (HalfPrecision("bfloat16"), PowerSGD(4), SignSGD(), Threshold())
# An exchange must become this many times faster: a codec costs memory, and most leave something for later.
LEAST_GAIN = 1.25
# And save so much: shorter exchanges differ by as much from one to the next on a busy machine.
LEAST_SAVED_SECS = 5e-3
# And this share of a step, where its time is known: a codec that leaves something for later needs more steps.
LEAST_SHARE_OF_STEP = 0.05
_ROUNDS = 8
# For so long one candidate is measured, after its first exchange.
_MOST_SECS = 2.0
# Steps after which an adaptive threshold and a power iteration have settled.
_SETTLING_STEPS = 8
_RANK = 32

Gradients = Sequence[tf.Tensor]


@dataclasses.dataclass(frozen=True)
class Choice:
    """Codec that was chosen, and the reason.

    Attributes:
      codec: None to send gradients as they are.
      reason: one line for the user.
    """

    codec: Codec | None
    reason: str


def choose(
    gradients: Gradients,
    sum_all: Callable[[Gradients], Gradients],
    transport: Any,
    slowest: Callable[[float], float],
    error_bound: float,
    step_secs: float | None = None,
) -> Choice:
    """Measures, and chooses the fastest candidate whose error is within the bound; all workers call it alike.

    Args:
      gradients: of this worker, float32, with static shapes; see `made_up`.
      sum_all: sums gradients as they are.
      transport: of codecs' messages; see `codec.Transport`.
      slowest: returns the largest of all workers' numbers.
      error_bound: largest share of the squared norm that an update may leave for later.
      step_secs: of a step of this worker with gradients as they are; None if it is not known.
    """
    size = sum(each.shape.num_elements() for each in gradients)
    step_secs = None if step_secs is None else slowest(step_secs)
    # Counts and logs are sent with gradients as they are; beside a codec they need a sum of their own.
    counts = [tf.zeros([4])]
    plain = _secs(lambda: sum_all([*gradients, *counts]), slowest)
    found: list[tuple[float, Codec]] = []
    excluded: list[str] = []
    for codec in CANDIDATES:
        state, error = _settled(codec, gradients)
        # Rounding and signs of random numbers differ between processors: all workers take the largest error.
        error = slowest(error)
        if error > error_bound:
            excluded.append(f"{codec!r} leaves {error:.1%} for later")
            continue

        def exchange(codec: Codec = codec, state: State = state) -> Gradients:
            sums, _ = codec.exchange(gradients, state, transport)
            return [*sums, *sum_all(counts)]

        found.append((_secs(exchange, slowest), codec))
    of_step = "" if step_secs is None else f", and a step {_shown(step_secs)}"
    as_it_is = f"a sum of {size:,} values takes {_shown(plain)} as they are{of_step}"
    beyond = f"; beyond error_bound={error_bound:g}: {', '.join(excluded)}" if excluded else ""
    if not found:
        return Choice(None, f"none: {as_it_is}{beyond}")
    secs, fastest = min(found, key=lambda each: each[0])
    least_saved = max(LEAST_SAVED_SECS, LEAST_SHARE_OF_STEP * (step_secs or 0.0))
    if plain < LEAST_GAIN * secs or plain - secs < least_saved:
        return Choice(None, f"none: {as_it_is}; a sum with the fastest codec, {fastest!r}, {_shown(secs)}{beyond}")
    return Choice(fastest, f"{fastest!r}: {as_it_is}; a sum with it {_shown(secs)}{beyond}")


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


def _settled(codec: Codec, gradients: Gradients) -> tuple[State, float]:
    """Returns the state of a codec after some steps on one worker, and its error in the last one."""
    state = codec.init([tf.TensorSpec(each.shape, each.dtype) for each in gradients])
    sent: Gradients = []
    before = state
    for _ in range(_SETTLING_STEPS):
        before = state
        sent, state = codec.exchange(gradients, before, LocalTransport())
    whole = left = 0.0
    for index, gradient in enumerate(gradients):
        kept = before.get(f"residual/{index}")
        wanted = gradient if kept is None else gradient + tf.reshape(kept, gradient.shape)
        whole += float(tf.reduce_sum(tf.square(wanted)))
        left += float(tf.reduce_sum(tf.square(wanted - sent[index])))
    return state, left / whole if whole else 0.0


def _secs(exchange: Callable[[], Gradients], slowest: Callable[[float], float]) -> float:
    """Returns the least of the slowest worker's seconds; the first call, which traces, does not count."""
    # As in a step, where nothing of it is Python's.
    call = tf.function(lambda: [tf.reshape(each, [-1])[:1] for each in exchange()], autograph=False)
    slowest(_once(call))
    found: list[float] = []
    while len(found) < _ROUNDS and sum(found) < _MOST_SECS:
        found.append(slowest(_once(call)))
    return min(found)


def _once(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    for each in call():
        each.numpy()
    return time.perf_counter() - began


def _shown(secs: float) -> str:
    return f"{secs:.2f} s" if secs >= 1 else f"{secs * 1e3:.1f} ms"
