# SPDX-License-Identifier: Apache-2.0
"""Compression: what the workers send of their gradients is encoded."""

from __future__ import annotations

from typing import Any

from tfdist.policies import base

_METHODS = ("init", "encode", "decode", "exchange")


class Compression(base.Policy):
    """Has each worker send its gradients encoded by a codec; what the codec leaves out is sent in a later step.

    The codec's state, such as what it has left out so far, belongs to each worker, and is part of a checkpoint. In the
    phase of a `Warmup` workers that share their variables by all-reduce send nothing; the one worker that trains on
    parameter servers sends encoded. Rows of embeddings and the counts of metrics are sent as without the policy.

    Args:
      codec: one of `tfdist.compression`, such as `tfdist.compression.Threshold("adaptive")`.

    Raises:
      ValueError: `codec` is none.
    """

    def __init__(self, codec: Any) -> None:
        super().__init__()
        if isinstance(codec, type) or not all(callable(getattr(codec, name, None)) for name in _METHODS):
            raise ValueError(
                "Compression(codec): give a codec of tfdist.compression, such as "
                f'tfdist.compression.Threshold("adaptive"). Received: codec={codec!r}'
            )
        self.codec = codec

    def __repr__(self) -> str:
        return f"Compression({self.codec!r})"
