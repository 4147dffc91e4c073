# SPDX-License-Identifier: Apache-2.0
"""Decides in which form variables and gradients cross the network between a worker and the parameter servers.

    rows of embeddings    gathered where the table is (`rewrites`)
    small variables       read together, their gradients sent together (`rewrites`, `bundles`)
    gradients of kernels  sent as two factors, multiplied on the parameter server (`rewrites`)
    kernels               not sent: inputs are multiplied on the parameter server (`rewrites`)

The first two cost nothing and are always worth it. The last two move arithmetic from the workers to the parameter
server. So they depend on the network, the server and the number of workers that it serves. Of a kernel each element
that is not sent saves 4 bytes, and each row that is multiplied with it takes 2 floating-point operations. While each of
s workers makes a step, a server either sends the kernel s times and the workers multiply, or it multiplies s times.
With n rows, bandwidth b, speed f, and workers as fast as the server:

    s 2n/f <= s 4/b + 2n/f    <=>    n <= 2 f/b * s/(s - 1)

A worker with a GPU multiplies in no time. Then the last factor is 1.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist import _log
from tfdist.compat.tensorflow.coordinator import CHIEF_DEVICE, SERVER_DEVICE
from tfdist.engines.transfer import encoding as encodings
from tfdist.engines.transfer import rewrites
from tfdist.transport.bundles import Bundles

# Measures the bandwidth to a parameter server, and how fast that server multiplies.


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


MODES = ("auto", "plain")


@dataclasses.dataclass(frozen=True)
class Transfer:
    """The form in which variables and gradients cross the network.

    Attributes:
      gathers_rows: embedding rows are gathered where the table is, so that they are sent and not the table.
      bundles_small: small variables of one server are read as one tensor, and small gradients sent as one.
      factor_rows: a kernel's gradient is sent as factors of at most so many rows; 0 for never.
      product_rows: a kernel is multiplied where it is with at most so many rows; 0 for never.
      reason: says by what the last two were decided.
    """

    gathers_rows: bool
    bundles_small: bool
    factor_rows: int
    product_rows: int
    reason: str

    def __str__(self) -> str:
        forms = [
            *(["embedding rows gathered at the table"] if self.gathers_rows else []),
            *(["small variables sent together"] if self.bundles_small else []),
            *([f"gradients sent as factors of up to {self.factor_rows} rows"] if self.factor_rows else []),
            *([f"products with kernels of up to {self.product_rows} rows on the server"] if self.product_rows else []),
        ]
        return f"{', '.join(forms) or 'each variable and gradient sent whole'} ({self.reason})"


_PLAIN = Transfer(False, False, 0, 0, 'transfer="plain"')
_UNMEASURED = Transfer(True, True, 0, 0, "no step with a large kernel yet")


class TransferPlan:
    """The transfer of one strategy, decided once and kept.

    Args:
      transfer: the decision, of which rows may still be open.
      measure_rows: returns the decision with its rows; called at the first step that has a large kernel. None if
        nothing is open.
      encoding: of the gradients that contributions consist of; None to send them as they are.
    """

    def __init__(
        self,
        transfer: Transfer,
        measure_rows: Callable[[], Transfer] | None = None,
        encoding: encodings.Encoding | None = None,
    ) -> None:
        self.encoding = encoding
        self._transfer = transfer
        self._measure_rows = measure_rows
        self._lock = threading.Lock()

    @property
    def transfer(self) -> Transfer:
        """The whole decision; the first call makes what is open."""
        with self._lock:
            if self._measure_rows is not None:
                self._transfer, self._measure_rows = self._measure_rows(), None
            return self._transfer

    def __str__(self) -> str:
        return str(self._transfer)

    # Actions of a step while it is traced.

    def reading(self, model: Any, worker: str) -> contextlib.AbstractContextManager[None]:
        """Within this block, a step of `model` that is traced for `worker` reads variables as decided."""
        if not self._transfer.bundles_small:
            return contextlib.nullcontext()
        return rewrites.read_together(model, worker)

    def contributing(self, model: Any, worker: str) -> contextlib.AbstractContextManager[None]:
        """Within this block, a step of `model` whose gradients may be encoded reads variables as decided."""
        dtype = self.encoding.read_dtype if self.encoding else None
        return self.reading(model, worker) if dtype is None else rewrites.read_rounded(model, worker, dtype)

    def training(self, model: Any, worker: str) -> contextlib.AbstractContextManager[None]:
        """Within this block, a train step of `model` reads variables and sends gradients as decided."""
        if not self._transfer.bundles_small:
            return contextlib.nullcontext()
        return rewrites.travel_together(model, worker, self._most_factor_rows)

    def placed(self, result: Any, batch_rows: tf.Tensor | None) -> Any:
        """Places gathers and products of the default graph, in which a step was traced, as decided.

        Args:
          result: what the step returns, a structure.
          batch_rows: the number of the step's examples; see `rewrites.at_the_kernel`.

        Returns:
          What the step is to return instead.
        """
        graph = tf.compat.v1.get_default_graph()
        if self._transfer.gathers_rows:
            rewrites.at_the_table(graph)
        if self._measure_rows is None and not self._transfer.product_rows:
            return result
        return rewrites.at_the_kernel(graph, result, self._most_product_rows, batch_rows)

    def bundles(self, specs: Sequence[Any], devices: Sequence[str], origins: Sequence[str] = ()) -> Bundles:
        """The tensors of a contribution, bundled as decided."""
        return Bundles(specs, devices, origins, are_apart=not self._transfer.bundles_small)

    def _most_factor_rows(self, inputs: int, outputs: int) -> int:
        return min(self.transfer.factor_rows, rewrites.saving_rows(inputs, outputs))

    def _most_product_rows(self, inputs: int, outputs: int) -> int:
        return min(self.transfer.product_rows, rewrites.saving_rows(inputs, outputs))


def plain() -> TransferPlan:
    """Each variable is read, and each gradient pushed, as stock TensorFlow does."""
    return TransferPlan(_PLAIN)


def encoded(mode: str, encoding: encodings.Encoding) -> TransferPlan:
    """Gradients are computed on the workers, whole, and sent encoded.

    Args:
      mode: one of `MODES`.
      encoding: of the gradients.
    """
    reason = f"gradients are sent encoded: {encoding.codec!r}"
    return TransferPlan(Transfer(mode != "plain", mode != "plain", 0, 0, reason), encoding=encoding)


def fixed(rows: int) -> TransferPlan:
    """Kernels are multiplied on the parameter servers with up to `rows` rows, whatever the cluster."""
    return TransferPlan(Transfer(True, True, rows, rows, "fixed"))


def choose_plan(
    mode: str,
    num_workers: int,
    num_ps: int,
    has_gpu: bool,
    measure: Callable[[], Speed] = measure,
    say: Callable[[str], object] = _log.say,
) -> TransferPlan:
    """The plan for `ParameterServerStrategy(transfer=mode)`.

    Args:
      mode: one of `MODES`.
      num_workers: workers of the cluster.
      num_ps: parameter servers of the cluster.
      has_gpu: whether the workers compute on a GPU.
      measure: returns the speed of a parameter server.
      say: writes the decision.
    """
    if mode == "plain":
        return plain()

    def measure_rows() -> Transfer:
        # A large kernel is on one server, and the kernels are spread over all.
        transfer = _measured(max(1.0, num_workers / num_ps), has_gpu, measure)
        say(f"transfer: {transfer}")
        return transfer

    return TransferPlan(_UNMEASURED, measure_rows)


def check_mode(transfer: Any) -> None:
    """Raises ValueError unless `transfer` is one of `MODES`."""
    if transfer not in MODES:
        raise ValueError(
            f"transfer must be one of {', '.join(map(repr, MODES))}; leave it out to have the cluster measured. "
            f"Received: transfer={transfer!r}"
        )


def most_rows(found: Speed, workers_per_server: float, has_gpu: bool) -> int:
    """Rows up to which multiplying on the server takes no longer than sending the kernel; see the module."""
    rows = 2 * found.flops_per_sec / found.bytes_per_sec
    # For one worker per server the limit would be infinite. That assumes a server as fast as the worker, which is not
    # measured.
    sharing = max(2.0, workers_per_server)
    return int(rows if has_gpu else rows * sharing / (sharing - 1))


def _measured(workers_per_server: float, has_gpu: bool, measure: Callable[[], Speed]) -> Transfer:
    try:
        found = measure()
    except Exception as error:  # Whatever it is, training goes on without.
        problem = " ".join(str(error).split())[:100] or type(error).__name__
        return Transfer(True, True, 0, 0, f"kernels are sent: the servers' speed could not be measured: {problem}")
    rows = most_rows(found, workers_per_server, has_gpu)
    reason = f"measured {found}; {workers_per_server:g} workers per server{', on GPUs' if has_gpu else ''}"
    return Transfer(True, True, rows, rows, reason)
