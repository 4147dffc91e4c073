# SPDX-License-Identifier: Apache-2.0
"""Compression: what the workers send of their gradients is encoded."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

from tfdist import _checks
from tfdist.policies import base

AUTO = "auto"
_HALVES = ("float16", "bfloat16")


@runtime_checkable
class GradientCodec(Protocol):
    """A `tfdist.compression.Codec`, which this package must not import."""

    commutes_with_sum: ClassVar[bool]
    unsent: ClassVar[tuple[str, ...]]

    def init(self, specs: Any) -> Any:
        """See `Codec.init`."""

    def encode(self, tensors: Any, state: Any) -> Any:
        """See `Codec.encode`."""

    def decode(self, received: Any, specs: Any, senders: Any = ()) -> Any:
        """See `Codec.decode`."""

    def exchange(self, tensors: Any, state: Any, transport: Any) -> Any:
        """See `Codec.exchange`."""


class Compression(base.Policy):
    """Encodes the gradients that each worker sends by a codec; what the codec leaves out is sent in a later step.

    The codec's state, such as the residual, belongs to each worker, and is part of a checkpoint. Rows of embeddings and
    the counts of metrics are not encoded.

    In the phase of a `Warmup`, workers that sum gradients by all-reduce send nothing; with `ramp` they don't encode.
    The one worker that trains on parameter servers sends encoded gradients.

    Args:
      codec: a codec of `tfdist.compression`, such as `tfdist.compression.Threshold("adaptive")`; or "auto". "auto"
        measures the network before the first step, and takes the codec that is fastest on it, or none.
      error_bound: for "auto": largest share, in (0, 1), of an update's squared norm that is left for later steps. 0.01
        admits half precision only.
      variables: "float16" or "bfloat16": parameter servers send workers the trainable weights in this dtype. By default
        in that of `HalfPrecision`, and with other codecs as they are.

    Raises:
      ValueError: an argument is invalid.
    """

    def __init__(
        self,
        codec: GradientCodec | Literal["auto"],
        error_bound: float = 0.99,
        variables: Literal["float16", "bfloat16"] | None = None,
    ) -> None:
        super().__init__()
        if codec != AUTO and (isinstance(codec, type) or not isinstance(codec, GradientCodec)):
            raise ValueError(
                "Compression(codec): give a codec of tfdist.compression, such as "
                f'tfdist.compression.Threshold("adaptive"), or "auto". Received: codec={codec!r}'
            )
        if not _checks.is_number(error_bound) or not 0 < error_bound < 1:
            raise ValueError(
                "Compression(error_bound=...) must be a share between 0 and 1, such as 0.99. "
                f"Received: error_bound={error_bound!r}"
            )
        if variables not in (None, *_HALVES):
            raise ValueError(
                f'Compression(variables=...) must be "float16", "bfloat16" or None. Received: variables={variables!r}'
            )
        self.codec: Any = codec
        self.error_bound = error_bound
        self.variables = variables

    def __repr__(self) -> str:
        bound = f", error_bound={self.error_bound!r}" if self.codec == AUTO else ""
        variables = f", variables={self.variables!r}" if self.variables else ""
        return f"{type(self).__name__}({self.codec!r}{bound}{variables})"
