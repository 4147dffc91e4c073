# SPDX-License-Identifier: Apache-2.0
"""Form in which variables and gradients cross the network between a worker and the parameter servers.

The form is decided for a strategy, and followed while a step is traced:

    rows of embeddings    gathered where the table is (`rewrites`)
    small variables       read together, their gradients sent together (`rewrites`, `bundles`)
    gradients of kernels  sent as two factors, multiplied on the parameter server (`rewrites`), or encoded (`encoding`)
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.engines.transfer import encoding as encodings
from tfdist.engines.transfer import rewrites
from tfdist.transport.bundles import Bundles

MODES = ("auto", "plain")


class TransferPlan:
    """The transfer of one strategy.

    Args:
      mode: one of `MODES`; "plain" reads each variable and pushes each gradient as stock TensorFlow does.
      encoding: of the gradients that contributions consist of; None to send them as they are.
    """

    def __init__(self, mode: str, encoding: encodings.Encoding | None = None) -> None:
        self.encoding = encoding
        self._is_plain = mode == "plain"

    def __str__(self) -> str:
        forms = ["embedding rows gathered at the table", "small variables sent together"]
        if self._is_plain:
            forms = ["each variable and gradient sent whole"]
        if self.encoding is not None:
            forms += [f"gradients sent encoded: {self.encoding.codec!r}"]
        elif not self._is_plain:
            forms += [f"gradients of large kernels sent as factors of up to {rewrites.MOST_ROWS} rows"]
        return ", ".join(forms)

    # Actions of a step while it is traced.

    def reading(self, model: Any, worker: str) -> contextlib.AbstractContextManager[None]:
        """Within this block, a step of `model` that is traced for `worker` reads variables as decided."""
        dtype = self.encoding.read_dtype if self.encoding else None
        is_stock = self._is_plain and dtype is None
        return contextlib.nullcontext() if is_stock else rewrites.read_together(model, worker, dtype)

    def training(self, model: Any, worker: str) -> contextlib.AbstractContextManager[None]:
        """Within this block, a train step of `model` reads variables and sends gradients as decided."""
        return contextlib.nullcontext() if self._is_plain else rewrites.travel_together(model, worker)

    def reading_once(self, model: Any, worker: str) -> contextlib.AbstractContextManager[None]:
        """Within this block, steps of `model` that train nothing read its dense weights once."""
        return contextlib.nullcontext() if self._is_plain else rewrites.read_together(model, worker, once=True)

    def place(self) -> None:
        """Places gathers of the default graph, in which a step was traced, as decided."""
        if not self._is_plain:
            rewrites.at_the_table(tf.compat.v1.get_default_graph())

    def bundles(self, specs: Sequence[Any], devices: Sequence[str], origins: Sequence[str] = ()) -> Bundles:
        """The tensors of a contribution, bundled as decided."""
        return Bundles(specs, devices, origins, are_apart=self._is_plain)


def check_mode(transfer: Any) -> None:
    """Raises ValueError unless `transfer` is one of `MODES`."""
    if transfer not in MODES:
        raise ValueError(
            f'transfer must be one of {", ".join(map(repr, MODES))}; leave it out for "auto". '
            f"Received: transfer={transfer!r}"
        )
