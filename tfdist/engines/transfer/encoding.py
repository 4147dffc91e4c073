# SPDX-License-Identifier: Apache-2.0
"""Encodes the dense gradients of a contribution on the worker, and decodes them on the parameter servers.

    worker                                          each parameter server
      gradients of its variables
      --> encode, with the state of this worker      decode, next to the sum and the update
                                        --message-->

There is one message for each parameter server and optimizer, and one state of the codec for each message: that of a
gradient transform (`step.gradients.ErrorFeedback`), in the memory of the worker. `HalfPrecision` has no state.
Everything else of a contribution (embedding rows, counts, logs) is sent as it is, in bundles.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.compat.keras.optimizers import loss_scale_of
from tfdist.compat.tensorflow import servers
from tfdist.compression import HalfPrecision, codec, gathered, on_servers
from tfdist.step import contribution
from tfdist.step.gradients import ErrorFeedback, Memory
from tfdist.transport.bundles import Bundles

# A device without a job is on the worker that runs the step.
_ON_WORKER = "/device:CPU:0"
# Dtypes of a message: a frame, and the name of its sender.
_MESSAGE = (tf.uint8, tf.uint8)


class Encoding:
    """Codec of a strategy, its state, and the bytes that each worker has sent.

    Args:
      chosen: a codec that `on_servers.check_codec` accepts.
      memory: of its state.
      num_workers: number of workers.
      variables: see `tfdist.Compression`.

    Attributes:
      codec: the same.
      feedback: encodes, sends and decodes gradients; its transport is a `Sending`.
    """

    def __init__(
        self, chosen: codec.Codec, memory: Memory | None, num_workers: int, variables: str | None = None
    ) -> None:
        self.codec = chosen
        self.feedback = ErrorFeedback(chosen, memory=memory, exchange=self._exchange)
        self._variables = variables
        self._sent = [0] * num_workers

    @property
    def read_dtype(self) -> tf.DType | None:
        """Dtype to which variables are rounded for their way to a worker; None if they are sent as they are."""
        name = self._variables or (self.codec.dtype if isinstance(self.codec, HalfPrecision) else None)
        return tf.as_dtype(name) if name else None

    def count(self, worker: int, sent: int) -> None:
        """Adds bytes that a worker has sent; only the thread of this worker may call it."""
        self._sent[worker] += sent

    def bytes_sent(self) -> list[int]:
        """Returns the bytes that each worker has sent so far."""
        return list(self._sent)

    def _exchange(
        self, gradients: Sequence[tf.Tensor], state: codec.State, sending: Sending
    ) -> tuple[list[tf.Tensor], codec.State]:
        specs = [tf.TensorSpec(each.shape, each.dtype) for each in gradients]
        if not isinstance(self.codec, gathered.GatheredCodec):
            with tf.device(_ON_WORKER):
                halves = tf.reshape(tf.bitcast(self.codec.encode(gradients, {})[0], tf.uint8), [-1])
                inputs = [tf.constant(on_servers.request("frame", specs)), halves]
                sending.message = servers.call_function(inputs, _MESSAGE)
            with tf.device(on_cpu(sending.device)):
                inputs = [tf.constant(on_servers.request("content", specs)), *sending.message]
                (content,) = servers.call_function(inputs, [tf.uint8])
            with tf.device(sending.device):
                halves = tf.bitcast(tf.reshape(content, [-1, 2]), tf.as_dtype(self.codec.dtype))
                return self.codec.decode(halves, specs), {}
        with tf.device(_ON_WORKER):
            flat = [tf.reshape(tf.cast(gradient, tf.float32), [-1]) for gradient in gradients]
            inputs = [tf.constant(on_servers.request("encode", specs, self.codec)), *flat, *state.values()]
            sent = servers.call_function(inputs, [*_MESSAGE, *(value.dtype for value in state.values())])
            sending.message, values = sent[: len(_MESSAGE)], sent[len(_MESSAGE) :]
            new = {name: tf.reshape(each, state[name].shape) for name, each in zip(state, values, strict=True)}
        with tf.device(on_cpu(sending.device)):
            inputs = [tf.constant(on_servers.request("decode", specs, self.codec)), *sending.message]
            flat = servers.call_function(inputs, [tf.float32] * len(specs))
            decoded = zip(flat, specs, strict=True)
            return [tf.cast(tf.reshape(values, spec.shape), spec.dtype) for values, spec in decoded], new

    def groups(
        self,
        gradients: Sequence[Any],
        targets: Sequence[tuple[Any, Any]],
        devices: Sequence[str],
        owners: Sequence[int],
    ) -> list[Group]:
        """Groups the gradients that are encoded, by parameter server and optimizer.

        Args:
          gradients: of a contribution, dense or `tf.IndexedSlices`.
          targets: optimizer and variable of each.
          devices: device of each variable.
          owners: index of the gradient that each tensor of the flat contribution is of.
        """
        members: dict[tuple[int, str], list[int]] = collections.defaultdict(list)
        for index, (gradient, (optimizer, _), device) in enumerate(zip(gradients, targets, devices, strict=True)):
            if is_encoded(gradient):
                members[id(optimizer), device].append(index)
        return [
            Group(targets[found[0]][0], [targets[i][1] for i in found], device, [owners.index(i) for i in found])
            for (_, device), found in members.items()
        ]


@dataclasses.dataclass
class Sending:
    """The way of a message to a parameter server.

    Attributes:
      device: of the variables.
      message: what was sent, once it is.
    """

    device: str
    message: Sequence[tf.Tensor] = ()


@dataclasses.dataclass(frozen=True)
class Group:
    """Gradients of one message.

    Attributes:
      optimizer: will apply them.
      variables: the variable of each.
      device: device of the variables.
      positions: of the gradients, in the flat contribution.
    """

    optimizer: Any
    variables: list[Any]
    device: str
    positions: list[int]


class EncodedBundles:
    """`Bundles` of which some tensors are encoded when they are sent.

    Args:
      encoding: of the strategy.
      groups: the encoded tensors.
      specs: the tensors, or their specs.
      devices: for each the device that it is sent to.
      bundle: makes the `Bundles` of the other tensors from their specs and devices.
    """

    # As `Bundles.are_small`: what is encoded is never sent before a policy has accepted it.
    are_small = False

    def __init__(
        self,
        encoding: Encoding,
        groups: Sequence[Group],
        specs: Sequence[Any],
        devices: Sequence[str],
        bundle: Callable[[Sequence[Any], Sequence[str]], Bundles],
    ) -> None:
        self._encoding = encoding
        self._groups = list(groups)
        self._encoded = [position for group in self._groups for position in group.positions]
        self._others = sorted(set(range(len(specs))) - set(self._encoded))
        self._bundles = bundle([specs[index] for index in self._others], [devices[index] for index in self._others])

    def pack(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the bundles, and behind them the tensors that will be encoded; all on the worker."""
        others = self._bundles.pack([tensors[index] for index in self._others])
        return [*others, *(tensors[index] for index in self._encoded)]

    def unpack(self, packed: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the tensors that were packed, in their order."""
        count = len(self._bundles.devices)
        tensors = dict(zip(self._others, self._bundles.unpack(packed[:count]), strict=True))
        tensors |= zip(self._encoded, packed[count:], strict=True)
        return [tensors[index] for index in range(len(tensors))]

    def send(self, packed: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Sends what `pack` has returned.

        Returns:
          The same tensors, decoded, on their devices; last the number of bytes that were sent, int64, on the worker.
        """
        count = len(self._bundles.devices)
        received, rest = self._bundles.send(packed[:count]), iter(self._all_or_none_finite(packed[count:]))
        sent = list(packed[:count])
        for group in self._groups:
            sending, gradients = Sending(group.device), [next(rest) for _ in group.positions]
            given = group.optimizer, gradients, group.variables, sending
            # The state is on the CPU, where Python encodes.
            with tf.device(_ON_WORKER):
                received += self._encoding.feedback.sum(*given, is_scaled=False)
            sent += sending.message
        with tf.device(_ON_WORKER):
            return [*received, tf.add_n([tf.size(each, tf.int64) * each.dtype.size for each in sent])]

    def _all_or_none_finite(self, gradients: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
        """Makes each message not finite if one of them is, so that no state changes in that step."""
        if len(self._groups) < 2 or not isinstance(self._encoding.codec, gathered.GatheredCodec):
            return gradients
        with tf.device(_ON_WORKER):
            is_finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(gradient)) for gradient in gradients])
            return tf.cond(
                is_finite,
                lambda: [tf.identity(gradient) for gradient in gradients],
                lambda: [tf.fill(gradient.shape, tf.cast(math.nan, gradient.dtype)) for gradient in gradients],
            )


def is_encoded(gradient: Any) -> bool:
    """Returns True for dense floating-point gradients of static shape."""
    is_dense = isinstance(gradient, tf.Tensor)
    return is_dense and gradient.shape.is_fully_defined() and codec.is_compressible(gradient.dtype)


def unscaled(gradients: Sequence[Any], targets: Sequence[tuple[Any, Any]]) -> list[Any]:
    """Divides gradients by the scale of the loss, which changes from step to step.

    Args:
      gradients: of a contribution; they get the static shapes of their variables.
      targets: optimizer and variable of each.
    """
    result = []
    for gradient, (_, variable), scale in zip(gradients, targets, _scales(targets), strict=True):
        if isinstance(gradient, tf.Tensor):
            gradient.set_shape(variable.shape)  # Not known by the gradients of some operations on rows.
        result.append(gradient if scale is None else contribution.times(gradient, 1 / scale))
    return result


def scaled(gradients: Sequence[Any], targets: Sequence[tuple[Any, Any]], devices: Sequence[str]) -> list[Any]:
    """Multiplies them by the present scale of the loss, by which the optimizer divides; on these devices."""
    result = []
    for gradient, scale, device in zip(gradients, _scales(targets), devices, strict=True):
        with tf.device(device):
            result.append(gradient if scale is None else contribution.times(gradient, scale))
    return result


def on_cpu(device: str) -> str:
    """Returns the CPU of the task of a device: Python runs there."""
    return tf.DeviceSpec.from_string(device).replace(device_type="CPU", device_index=0).to_string()


def _scales(targets: Sequence[tuple[Any, Any]]) -> list[tf.Tensor | None]:
    optimizers = {id(optimizer): optimizer for optimizer, _ in targets}
    scales = {key: loss_scale_of(optimizer) for key, optimizer in optimizers.items()}
    return [scales[id(optimizer)] for optimizer, _ in targets]
