# SPDX-License-Identifier: Apache-2.0
"""Measures the bandwidth to a parameter server, and how fast that server multiplies."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable

import tensorflow as tf

from tfdist.compat.cluster_joining import CHIEF_DEVICE, SERVER_DEVICE

# The slowest network that is measured within the limit: 4 MB in half a second.
LIMIT_SECS = 0.9
_ELEMENTS = 1 << 20
_ROWS, _WIDTH = 64, 2048
# The fastest of several attempts counts; the first one opens connections.
_ATTEMPTS = 4


@dataclasses.dataclass(frozen=True)
class Speed:
    """Speed of a parameter server.

    Attributes:
      bytes_per_sec: bandwidth from the server to another process.
      flops_per_sec: floating-point operations of a matrix product on the server.
    """

    bytes_per_sec: float
    flops_per_sec: float

    def __str__(self) -> str:
        return f"{self.bytes_per_sec / 1e9:.2f} GB/s, {self.flops_per_sec / 1e9:.0f} GFLOP/s"


def measure(server: str = SERVER_DEVICE, limit_secs: float = LIMIT_SECS) -> Speed:
    """Fetches a tensor of 4 MB from a parameter server, and has the server multiply two matrices.

    May be called while a step is traced: the measurement runs in a thread of its own, outside of graphs and scopes.

    Args:
      server: the device of the server.
      limit_secs: after this time the measurement is given up.

    Raises:
      TimeoutError: it took longer than that.
      tf.errors.OpError: the server can't be reached.
    """
    found: list[Speed] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            found.append(_measure(server, time.perf_counter() + limit_secs / 2))
        except Exception as error:  # Raised below, in the caller's thread.
            errors.append(error)

    # A thread that may be left behind: a call into TensorFlow's runtime can't be interrupted.
    thread = threading.Thread(target=run, name="tfdist-speed", daemon=True)
    thread.start()
    thread.join(limit_secs)
    if errors:
        raise errors[0]
    if not found:
        raise TimeoutError(f"no answer within {limit_secs:g} s")
    return found[0]


def _measure(server: str, deadline: float) -> Speed:
    with tf.device(server):
        few, many = tf.zeros([1]), tf.zeros([_ELEMENTS])
        matrix, kernel = tf.zeros([_ROWS, _WIDTH]), tf.zeros([_WIDTH, _WIDTH])

    def multiply() -> None:
        with tf.device(server):
            product = tf.matmul(matrix, kernel)
        # A result of one element: the time is that of the product, and not of its way.
        _fetch(_corner(product, server))

    trip, fetch, control, product = (
        _fastest(each, deadline)
        for each in (
            lambda: _fetch(few),
            lambda: _fetch(many),
            lambda: _fetch(_corner(matrix, server)),
            multiply,
        )
    )
    return Speed(
        bytes_per_sec=4 * _ELEMENTS / _difference(fetch, trip),
        flops_per_sec=2 * _ROWS * _WIDTH * _WIDTH / _difference(product, control),
    )


def _fetch(tensor: tf.Tensor) -> None:
    with tf.device(CHIEF_DEVICE):
        tf.identity(tensor).numpy()


def _corner(matrix: tf.Tensor, server: str) -> tf.Tensor:
    with tf.device(server):
        return tf.slice(matrix, [0, 0], [1, 1])


def _fastest(call: Callable[[], None], deadline: float) -> float:
    """Seconds of the fastest of several calls; of fewer once the time is up, but at least of two."""
    secs: list[float] = []
    while len(secs) < 2 or (len(secs) < _ATTEMPTS and time.perf_counter() < deadline):
        begun = time.perf_counter()
        call()
        secs.append(time.perf_counter() - begun)
    return min(secs)


def _difference(secs: float, overhead: float) -> float:
    """Without the round trip, unless noise makes the difference meaningless."""
    return max(secs - overhead, secs / 10)
