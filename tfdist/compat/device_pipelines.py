# SPDX-License-Identifier: Apache-2.0
"""Makes the pipelines with which TensorFlow hands batches to replicas cheap, traced once and not tuned; and in order.

For each pass over a distributed data set TensorFlow makes, besides the user's pipeline, one for each device, which
fetches that device's batches. Its options can't be set from outside. Each has a thread for tuning, where there is
nothing to tune, and may hold up the program when it is deleted, as `compat.array_data` tells. And for each, six
functions are traced, which differ only in what they capture: half of the time of a small `predict`.

In a graph TensorFlow reads for all devices at once. An error of the data is raised for one of them, and for the next
one the data are at their end: whichever comes first is raised, so that `fit` may end without an error. Read one after
the other, the error comes first.

Three functions are replaced, for good and for the whole process: who iterates later, and in which thread, is not known
here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.data.ops import multi_device_iterator_ops
from tensorflow.python.eager import context
from tensorflow.python.eager.polymorphic_function import atomic_function
from tensorflow.python.ops import gen_dataset_ops

from tfdist.compat import array_data, replacing

NEEDS = (
    "tensorflow.python.data.ops.multi_device_iterator_ops:OwnedMultiDeviceIterator._devices",
    "tensorflow.python.data.ops.multi_device_iterator_ops:OwnedMultiDeviceIterator.get_next(device)",
    "tensorflow.python.data.ops.multi_device_iterator_ops:_PerDeviceGenerator.__init__(incarnation_id, source_device)",
    "tensorflow.python.data.ops.multi_device_iterator_ops:_PerDeviceGenerator._finalize_captured_args",
    "tensorflow.python.data.ops.multi_device_iterator_ops:_PerDeviceGenerator._finalize_func",
    "tensorflow.python.data.ops.multi_device_iterator_ops:_PerDeviceGenerator._flat_structure",
    "tensorflow.python.data.ops.multi_device_iterator_ops:_PerDeviceGenerator._incarnation_id_index",
    "tensorflow.python.data.ops.multi_device_iterator_ops:_PerDeviceGenerator._init_captured_args",
    "tensorflow.python.data.ops.multi_device_iterator_ops:_PerDeviceGenerator._init_func",
    "tensorflow.python.data.ops.multi_device_iterator_ops:_PerDeviceGenerator._next_captured_args",
    "tensorflow.python.data.ops.multi_device_iterator_ops:_PerDeviceGenerator._next_func",
    "tensorflow.python.data.ops.multi_device_iterator_ops:_create_device_dataset",
    "tensorflow.python.eager.context:context",
    "tensorflow.python.eager.polymorphic_function.atomic_function:AtomicFunction._bound_context",
    "tensorflow.python.eager.polymorphic_function.atomic_function:AtomicFunction._children",
    "tensorflow.python.eager.polymorphic_function.concrete_function:ConcreteFunction._inference_function",
    "tensorflow.python.ops.gen_dataset_ops:generator_dataset",
    "tensorflow.python.ops.gen_dataset_ops:multi_device_iterator_to_string_handle",
)

# An attribute of TensorFlow's context, in which functions live: what was traced, by what it was traced for.
_TRACED = "_tfdist_device_pipelines"
_MOST_TRACED = 200
_NAMES = ("init", "next", "finalize")


def leave_untuned() -> None:
    """Replaces the three functions; does nothing if it was called before."""
    replacing.once(multi_device_iterator_ops, "_create_device_dataset", _untuned)
    replacing.once(multi_device_iterator_ops._PerDeviceGenerator, "__init__", _traced_once)
    replacing.once(multi_device_iterator_ops.OwnedMultiDeviceIterator, "get_next", _one_after_the_other)


def _one_after_the_other(get_next: Callable[..., Any]) -> Callable[..., Any]:
    def in_order(self: Any, device: Any = None) -> Any:
        if device is not None:
            return get_next(self, device)
        found: list[Any] = []
        for each in self._devices:
            before = [leaf for leaf in tf.nest.flatten(found[-1:], expand_composites=True) if tf.is_tensor(leaf)]
            with tf.device(each), tf.control_dependencies(before):
                found.append(get_next(self, each))
        return found

    return in_order


def _untuned(made: Callable[..., Any]) -> Callable[..., Any]:
    def untuned(*args: Any, **kwargs: Any) -> Any:
        return array_data.without_tuning(made(*args, **kwargs))

    return untuned


def _traced_once(original: Callable[..., None]) -> Callable[..., None]:
    def initialize(
        self: Any,
        shard_num: int,
        multi_device_iterator_resource: Any,
        incarnation_id: Any,
        source_device: Any,
        element_spec: Any,
        iterator_is_anonymous: bool,
    ) -> None:
        own = {"resource": multi_device_iterator_resource, "incarnation": incarnation_id, "source": source_device}
        is_eager = tf.executing_eagerly() and iterator_is_anonymous
        ctx = context.context()
        traced = vars(ctx).setdefault(_TRACED, {})
        flat = tuple(tf.nest.flatten(element_spec))
        key = is_eager and (shard_num, source_device.numpy(), ctx.device_name, flat)
        if key in traced:
            own["handle"] = gen_dataset_ops.multi_device_iterator_to_string_handle(multi_device_iterator_resource)
            self._name, self._element_spec = f"device_generator_{shard_num}", element_spec
            traced[key].give_to(self, own)
            return
        original(self, shard_num, *own.values(), element_spec, iterator_is_anonymous)
        if is_eager:
            if len(traced) >= _MOST_TRACED:
                traced.clear()
            traced[key] = _Functions.of(self, own)

    return initialize


def _without_graph(function: atomic_function.AtomicFunction) -> atomic_function.AtomicFunction:
    """The same function of the runtime, which keeps neither the graph that it was traced in nor what that captures."""
    children = [_without_graph(child) for child in function._children]
    return atomic_function.AtomicFunction(function.name, function._bound_context, function.function_type, children)


@dataclasses.dataclass(frozen=True)
class _Function:
    """Function argument of an operation, with the tensors that it captures in this pass."""

    traced: atomic_function.AtomicFunction
    captured_inputs: list[Any]

    @property
    def name(self) -> bytes:
        """Name under which the runtime knows the function, for the lifetime of this object."""
        return self.traced.name


@dataclasses.dataclass(frozen=True)
class _Functions:
    """The functions of one pipeline, by name, with the parts that what they capture plays in it."""

    traced: dict[str, tuple[atomic_function.AtomicFunction, list[str]]]

    @classmethod
    def of(cls, pipeline: Any, own: dict[str, Any]) -> _Functions:
        """Takes them from a pipeline that was made for the objects `own`."""

        def part(captured: Any) -> str:
            # None of the arguments: the handle that TensorFlow makes of the resource.
            return next((name for name, each in own.items() if each is captured), "handle")

        traced = {name: getattr(pipeline, f"_{name}_func")._inference_function for name in _NAMES}
        return cls(
            {
                name: (_without_graph(function), [part(each) for each in vars(pipeline)[_captured(name)]])
                for name, function in traced.items()
            }
        )

    def give_to(self, pipeline: Any, own: dict[str, Any]) -> None:
        """Makes a pipeline of them for the objects `own`."""
        arguments, functions = [], {}
        for name, (traced, parts) in self.traced.items():
            captured = [own[part] for part in parts]
            # The resource is kept alive by what is captured, but is no argument of the function.
            function = _Function(traced, [each for each in captured if each is not own["resource"]])
            vars(pipeline).update({f"_{name}_func": function, _captured(name): captured})
            arguments.append(captured)
            functions[f"{name}_func"] = function
        pipeline._incarnation_id_index = self.traced["next"][1].index("incarnation")
        variant = gen_dataset_ops.generator_dataset(*arguments, **functions, **pipeline._flat_structure)
        tf.data.Dataset.__init__(pipeline, variant)


def _captured(name: str) -> str:
    return f"_{name}_captured_args"
