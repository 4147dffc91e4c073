# SPDX-License-Identifier: Apache-2.0
"""Base class of codecs, and the protocol of the transports that carry their messages."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import tensorflow as tf

from tfdist import _checks

# State of a codec by name, such as "residual/0" of the first tensor.
State = dict[str, "tf.Tensor"]
# Names, because server processes import this module without most of TensorFlow (`compat.tensorflow.servers`).
_FLOATS = ("float16", "bfloat16", "float32", "float64")


class Transport(Protocol):
    """Carries messages between workers. All workers call it alike, in one order."""

    @property
    def num_workers(self) -> int:
        """Number of workers, this one included."""
        ...

    @property
    def senders(self) -> Sequence[str]:
        """Name of the sender of each row of `gather`, for messages of errors."""
        ...

    def sum(self, flat: tf.Tensor) -> tf.Tensor:
        """Returns the sum of the workers' 1-D tensors, which have one size and dtype."""
        ...

    def gather(self, message: tf.Tensor) -> tf.Tensor:
        """Returns the workers' messages, uint8 [num_workers, capacity]; shorter messages are padded.

        Args:
          message: uint8 1-D, whose length differs between the workers.
        """
        ...


class LocalTransport:
    """Transport of one worker: nothing is sent."""

    num_workers = 1
    senders: Sequence[str] = ("worker:0",)

    def sum(self, flat: tf.Tensor) -> tf.Tensor:
        """Returns its argument."""
        return flat

    def gather(self, message: tf.Tensor) -> tf.Tensor:
        """Returns the one row, [1, length]."""
        return message[tf.newaxis]


@dataclasses.dataclass(frozen=True, repr=False)
class Codec:
    """Encodes the gradients of a step. Pure: state goes in and comes out, and no method has a side effect.

    A codec with error feedback keeps a residual in its state: gradients sent plus residual kept equal the gradients
    received. Codecs are frozen, compare by their arguments, and work eagerly and in a `tf.function` on CPUs. Gathered
    codecs run in `tf.numpy_function`, which XLA does not compile.

    All arithmetic is in float32: gradients of float64 are rounded, and sums are cast to the dtype of their tensor. If a
    gradient is not finite, the sum is not finite on any worker (for gathered codecs in each tensor). The state stays as
    it was.
    """

    # True if encoded tensors may be summed (all-reduce); else messages are gathered (all-gather).
    commutes_with_sum: ClassVar[bool]
    # State (the name before the slash) that is gradient which was not sent: other workers may get it, in equal parts.
    unsent: ClassVar[tuple[str, ...]] = ("residual",)

    def init(self, specs: Sequence[tf.TensorSpec]) -> State:
        """Returns the state before the first step.

        Args:
          specs: of the gradients, in the order of each step, with static shapes.

        Raises:
          ValueError: a gradient is not floating-point, or its shape is not known.
        """
        return {name: tf.zeros(spec.shape, spec.dtype) for name, spec in self.state_specs(specs).items()}

    def state_specs(self, specs: Sequence[tf.TensorSpec]) -> dict[str, tf.TensorSpec]:
        """Returns the spec of each tensor of the state, by name.

        Args:
          specs: of the gradients; see `init`.

        Raises:
          ValueError: a gradient is not floating-point, or its shape is not known.
        """
        return self._state_specs(checked_specs(self, specs))

    def encode(self, tensors: Sequence[tf.Tensor], state: State) -> tuple[tf.Tensor, State]:
        """Encodes the gradients of one step.

        Args:
          tensors: the gradients.
          state: result of `init`, or of the last `encode`.

        Returns:
          The message, 1-D. For gathered codecs uint8, with a header and a checksum; for codecs that commute with the
          sum of the dtype that is sent. And the new state.

        Raises:
          TypeError: a gradient is sparse.
          ValueError: a gradient is not floating-point, or the state is that of other tensors.
        """
        return self._encode(tensors, self._checked(tensors, state), state)

    def decode(
        self, received: tf.Tensor, specs: Sequence[tf.TensorSpec], senders: Sequence[str] = ()
    ) -> list[tf.Tensor]:
        """Decodes the sum of the workers' gradients.

        Args:
          received: uint8 [num_workers, capacity], the messages of all workers, padded behind their end; for codecs that
            commute with the sum, the sum of the messages.
          specs: of the gradients.
          senders: name of the sender of each row.

        Returns:
          The sum over the workers of what they sent, of each tensor.

        Raises:
          ValueError: a message is truncated or damaged, or does not fit; its sender is named. In a `tf.function` it is
            `tf.errors.InvalidArgumentError` with the same text.
        """
        return self._decode(received, checked_specs(self, specs), senders)

    def exchange(
        self, tensors: Sequence[tf.Tensor], state: State, transport: Transport
    ) -> tuple[list[tf.Tensor], State]:
        """Sums gradients over the workers.

        Args:
          tensors: this worker's gradients.
          state: result of `init`, or of the last `exchange`.
          transport: sums or gathers the messages.

        Returns:
          The sums, equal on all workers, and the new state. If a worker's gradient was not finite, the sums contain a
          NaN or an infinity, and the state of each worker is the old one.
        """
        specs = self._checked(tensors, state)
        message, new = self._encode(tensors, specs, state)
        if self.commutes_with_sum:
            return self.decode(transport.sum(message), specs), new
        sums = self.decode(transport.gather(message), specs, transport.senders)
        return sums, keep_if(_heads_are_finite(sums), new, state)

    def __repr__(self) -> str:
        given = [
            f"{field.name}={value!r}"
            for field in dataclasses.fields(self)
            if (value := getattr(self, field.name)) != field.default
        ]
        return f"{type(self).__name__}({', '.join(given)})"

    def _checked(self, tensors: Sequence[Any], state: State) -> list[tf.TensorSpec]:
        for index, tensor in enumerate(tensors):
            if isinstance(tensor, tf.IndexedSlices | tf.SparseTensor):
                raise TypeError(
                    f"{self!r} compresses dense gradients; send the rows of a sparse one as they are, or convert it by "
                    f"tf.convert_to_tensor. Received: {type(tensor).__name__} as gradient {index}"
                )
        specs = checked_specs(self, [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors])
        given = {name: (value.dtype, value.shape) for name, value in state.items()}
        if given != {name: (spec.dtype, spec.shape) for name, spec in self._state_specs(specs).items()}:
            raise ValueError(
                f"the state is not that of these gradients under {self!r}; call init again. Received: {given}"
            )
        return specs

    def _state_specs(self, specs: Sequence[tf.TensorSpec]) -> dict[str, tf.TensorSpec]:
        """Returns the spec of each tensor of the state, by name."""
        del specs
        return {}

    def _encode(
        self, tensors: Sequence[tf.Tensor], specs: Sequence[tf.TensorSpec], state: State
    ) -> tuple[tf.Tensor, State]:
        raise TypeError(f"{self!r} needs more than one message; call exchange, not encode; of one, define _encode")

    def _decode(self, received: tf.Tensor, specs: Sequence[tf.TensorSpec], senders: Sequence[str]) -> list[tf.Tensor]:
        raise TypeError(f"{self!r} needs more than one message; call exchange, not decode; of one, define _decode")


def sizes_of(specs: Sequence[tf.TensorSpec]) -> list[int]:
    """Returns the number of values of each tensor."""
    return [spec.shape.num_elements() for spec in specs]


def split(flat: tf.Tensor, specs: Sequence[tf.TensorSpec]) -> list[tf.Tensor]:
    """Splits a 1-D tensor into tensors of these shapes and dtypes."""
    pieces = tf.split(flat, sizes_of(specs)) if specs else []
    return [tf.cast(tf.reshape(piece, spec.shape), spec.dtype) for piece, spec in zip(pieces, specs, strict=True)]


def keep_if(condition: tf.Tensor, new: State, old: State) -> State:
    """Returns the new state if the condition holds, else the old one."""
    names = list(new)
    if not names:
        return new
    chosen = tf.cond(condition, lambda: [new[name] for name in names], lambda: [old[name] for name in names])
    return dict(zip(names, chosen, strict=True))


def _heads_are_finite(sums: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns True if the first value of each sum is finite: a gathered NaN is in each value."""
    heads = [tf.cast(tf.reshape(total, [-1])[:1], tf.float32) for total in sums]
    return tf.reduce_all(tf.math.is_finite(tf.concat(heads, 0))) if heads else tf.constant(True)


def checked_specs(codec: Codec, specs: Sequence[tf.TensorSpec]) -> list[tf.TensorSpec]:
    """Returns the specs.

    Raises:
      ValueError: a gradient is not floating-point, or its shape is not known.
    """
    for index, spec in enumerate(specs):
        name = f"gradient {index}" + (f" ({spec.name})" if getattr(spec, "name", None) else "")
        if not is_compressible(spec.dtype):
            raise ValueError(
                f"{codec!r} compresses floating-point gradients only. Received: {name} of dtype {spec.dtype.name}"
            )
        if not spec.shape.is_fully_defined():
            raise ValueError(f"{codec!r} needs gradients of static shape. Received: {name} of shape {spec.shape}")
    return list(specs)


def is_compressible(dtype: tf.DType) -> bool:
    """Returns True for the dtypes of gradients that codecs compress."""
    return dtype.name in _FLOATS


def check_fraction(codec: str, name: str, value: Any) -> None:
    """Raises ValueError unless a density is in (0, 1]."""
    if not _checks.is_number(value) or not 0 < value <= 1:
        raise ValueError(f"{codec}({name}=...) must be a density in (0, 1], such as 0.001. Received: {name}={value!r}")
