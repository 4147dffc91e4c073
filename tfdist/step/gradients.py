# SPDX-License-Identifier: Apache-2.0
"""Runs the gradient transforms of a strategy, and keeps their state: `tfdist.transforms`.

    on a replica   gradients of its part of the batch --> "replica" --> "arrival" --> weighed, sent
    at the update  sum of the gradients               --> "update"  --> optimizer

These are two calls, `Transforms.on_replica` and `Transforms.at_update`, in two places. One is where a step of all
replicas patches `optimizer.apply` (`replicas`), the other the two halves of a split step (`split`). Workers of
parameter servers run "arrival" where an update adds their gradients up; without a policy they run all of it themselves.

`Transforms` belongs to a strategy. It owns the state by optimizer and variables; a `Memory` says where that is. The
state of a codec is one of these, too (`ErrorFeedback`).
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist import _log
from tfdist import transforms as gradient_transforms
from tfdist.compat.keras.optimizers import (
    indices_of,
    iterations_of,
    loss_scale_of,
    optimizers_of,
    patched_attributes,
    sum_dense_by,
    trained_by,
)
from tfdist.compat.tensorflow import replicas
from tfdist.compat.tensorflow.variables import variable_of_process
from tfdist.step import rehearsal
from tfdist.transforms import ARRIVAL, REPLICA, UPDATE, GradientTransform, Info

# Transforms of a replica by itself.
ON_REPLICA = (REPLICA, ARRIVAL)
# Kinds of a codec's sums: entries that one leaves out can't be sent with the other.
GRADIENTS, DIFFERENCES = "gradients", "differences"


class Memory(abc.ABC):
    """The place of the transforms' state: one copy for each replica, or one for all updates."""

    @abc.abstractmethod
    def replica(self) -> Any:
        """Returns the number of the replica that is traced, for `Info.replica`."""

    @abc.abstractmethod
    def read(self, state: Kept) -> list[tf.Tensor]:
        """Returns the state of the replica, or update, that is traced."""

    @abc.abstractmethod
    def write(self, state: Kept, values: Sequence[tf.Tensor], is_only: bool) -> None:
        """Writes it.

        Args:
          state: what is written.
          values: its new values.
          is_only: True if this is traced once for all replicas of the process, and not on each.
        """

    @abc.abstractmethod
    def collect(self, states: Sequence[Kept]) -> list[list[np.ndarray]]:
        """Returns the values of some states, flat, of each replica of the job, on the chief; at the update of one."""

    @abc.abstractmethod
    def distribute(self, states: Sequence[Kept], values: Callable[[int], Sequence[Sequence[np.ndarray]]]) -> None:
        """Gives each replica its values; `values`, of a number of replicas, is called on the chief alone."""


@dataclasses.dataclass(eq=False)
class Kept:
    """State of one transform for the gradients of some variables.

    Attributes:
      key: identifies it, the same in all runs of one program: (position in the list, optimizer, variables).
      transform: the transform.
      variables: the Keras variables.
      structure: the state, of specs.
      held: what a `Memory` keeps of it.
    """

    key: tuple[int, int, tuple[int, ...]]
    transform: GradientTransform
    variables: Sequence[Any]
    structure: Any
    held: dict[Any, Any] = dataclasses.field(default_factory=dict)

    @property
    def specs(self) -> list[tf.TensorSpec]:
        """The specs of the state, flat."""
        return tf.nest.flatten(self.structure)

    def initial(self) -> list[tf.Tensor]:
        """Returns the first values, flat."""
        return [tf.convert_to_tensor(leaf) for leaf in tf.nest.flatten(self.transform.init(self.variables))]

    def described(self) -> list[Any]:
        """JSON data."""
        return [self.transform.where, *self.key[:2], list(self.key[2]), [_kind(spec) for spec in self.specs]]


class Transforms:
    """The transforms of a strategy. A `policies.saved_state.WorkerState`.

    Args:
      transforms: the strategy's argument, checked and in order.
      memory: where state is; needed if there are transforms.

    Attributes:
      list: the transforms.
      memory: likewise.
    """

    def __init__(self, transforms: Sequence[GradientTransform], memory: Memory | None = None) -> None:
        self.list = tuple(transforms)
        self.memory: Any = memory
        self._kept: weakref.WeakKeyDictionary[Any, dict[Any, Kept]] = weakref.WeakKeyDictionary()

    def has(self, *places: str) -> bool:
        """Returns True if there is a transform of one of these places."""
        return any(each.where in places for each in self.list)

    # In a step.

    def run(
        self,
        places: Sequence[str],
        optimizer: Any,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        unit: Any = 1.0,
        is_only: bool = True,
        counts: Any = None,
        is_scaled: bool = True,
        **info: Any,
    ) -> list[Any]:
        """Runs the transforms of these places.

        Args:
          places: of `tfdist.transforms.PLACES`.
          optimizer: the Keras optimizer that will be given the gradients.
          gradients: dense, or rows; None stays None.
          variables: the variable of each.
          unit: the factor to the gradient of one device.
          is_only: see `Memory.write`.
          counts: bool scalar: False if the gradients won't count, so that state must not change; None if they do.
          is_scaled: True if gradients have the scale of a `LossScaleOptimizer`, if the optimizer is one.
          **info: see `tfdist.transforms.Info`; the step is that of the optimizer.
        """
        chosen = [(number, each) for number, each in enumerate(self.list) if each.where in places]
        present = [index for index, gradient in enumerate(gradients) if gradient is not None]
        if not chosen or not present:
            return list(gradients)
        given = [gradients[index] for index in present]
        of = [variables[index] for index in present]
        scale, is_finite = loss_scale_of(optimizer), None
        if scale is not None:
            scale = scale if is_scaled else 1.0
            # The optimizer leaves such a step out, and lowers the scale.
            is_finite = gradient_transforms.are_finite(given)
            counts = is_finite if counts is None else tf.logical_and(counts, is_finite)
        begun = _in_unit(given, unit, scale)
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        about = Info(**({"step": lambda: tf.convert_to_tensor(iterations_of(inner))} | info))
        found = begun
        for number, transform in chosen:
            found = self._applied(number, transform, optimizer, found, of, about, is_only, counts)
        new = [
            g if after is before else _back(after, unit, scale, g.dtype, is_finite)
            for g, before, after in zip(given, begun, found, strict=True)
        ]
        in_place = dict(zip(present, new, strict=True))
        return [in_place.get(index) for index in range(len(gradients))]

    def on_replica(self, *args: Any, with_arrival: bool = True, **kwargs: Any) -> list[Any]:
        """Runs what is to be done before gradients are sent; see `run` for the arguments."""
        places = ON_REPLICA if with_arrival else (REPLICA,)
        return self.run(places, *args, replica=lambda: self.memory.replica(), **kwargs)

    def at_update(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Runs what is to be done with the sum of gradients; see `run` for the arguments."""
        return self.run((UPDATE,), *args, **kwargs)

    @contextlib.contextmanager
    def alone(self, model: keras.Model, info: Callable[[Any, Sequence[Any]], dict[str, Any]]) -> Iterator[None]:
        """Within this block, `apply` of the model's optimizers runs all transforms, for a replica that updates alone.

        Args:
          model: the model.
          info: returns what is known of gradients, from an optimizer and its gradients; see `run`.
        """
        if not self.list:
            yield
            return

        def replaced(optimizer: Any) -> Callable[..., Any]:
            apply = optimizer.apply

            def with_transforms(grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> Any:
                given, grads = trainable_variables, list(grads)
                variables = trained_by(optimizer) if given is None else list(given)
                known = info(optimizer, grads)
                for place in (REPLICA, ARRIVAL, UPDATE):
                    grads = self.run((place,), optimizer, grads, variables, replica=self.memory.replica, **known)
                return apply(grads, given)

            return with_transforms

        optimizers = optimizers_of(model)
        with patched_attributes([(each, "apply", replaced(each)) for each in optimizers]):
            yield

    @contextlib.contextmanager
    def refused(self, function: Callable[..., Any], *args: Any) -> Iterator[None]:
        """Within this block, a function of the user's own can't apply gradients, which nothing would transform."""

        def refuse(optimizer: Any) -> Callable[..., Any]:
            def apply(*args: Any, **kwargs: Any) -> Any:
                raise ValueError(
                    "transforms: only the gradients of strategy.run(model.train_step, args=(batch,)) and of fit are "
                    "transformed; make this function the train_step of a model, or leave transforms away. Received: "
                    f"optimizer {optimizer.name!r}, applied in {getattr(function, '__name__', function)!s}"
                )

            return apply

        found = rehearsal.used_by(function, *args) if self.list else ()
        optimizers = [each for each in found if isinstance(each, keras.optimizers.Optimizer)]
        with patched_attributes([(each, "apply", refuse(each)) for each in optimizers]):
            yield

    def _applied(
        self,
        number: int,
        transform: GradientTransform,
        optimizer: Any,
        gradients: list[Any],
        variables: Sequence[Any],
        info: Info,
        is_only: bool,
        counts: Any,
    ) -> list[Any]:
        state = self._state_of(number, transform, optimizer, variables)
        before = self.memory.read(state) if state.specs else []
        packed = tf.nest.pack_sequence_as(state.structure, before) if state.specs else state.structure
        found, after = transform.update(list(gradients), packed, info)
        _check_result(transform, gradients, found, state, after)
        if state.specs:
            new = [tf.convert_to_tensor(leaf) for leaf in tf.nest.flatten(after)]
            if counts is not None:
                new = [tf.where(counts, *pair) for pair in zip(new, before, strict=True)]
            self.memory.write(state, new, is_only)
        return list(found)

    def _state_of(self, number: int, transform: GradientTransform, optimizer: Any, variables: Sequence[Any]) -> Kept:
        indices = indices_of(optimizer, variables)
        of_optimizer = self._kept.setdefault(optimizer, {})
        if (number, indices) not in of_optimizer:
            # Keras gives TensorFlow's variables here and there.
            of_keras = [trained_by(optimizer)[index] for index in indices]
            structure = _specs_of(transform, of_keras)
            of_optimizer[number, indices] = Kept((number, 0, indices), transform, of_keras, structure)
        return of_optimizer[number, indices]

    # Checkpoints.

    def collect(self, model: keras.Model) -> tuple[Any, list[np.ndarray]]:
        """See `WorkerState.collect`: each state of each replica, and each state of the updates once."""
        states = self.states_of(model)
        if not states:
            return None, []
        by_replica = self.memory.collect(states)
        described = {
            "transforms": [repr(each) for each in self.list],
            "states": [state.described() for state in states],
        }
        return described, [array for arrays in by_replica for array in arrays]

    def distribute(self, model: keras.Model, described: Any, arrays: Sequence[np.ndarray]) -> None:
        """See `WorkerState.distribute`. What the checkpoint does not have begins anew."""
        is_of_these = described and described.get("transforms") == [repr(each) for each in self.list]
        states = self._again(optimizers_of(model), described["states"]) if is_of_these else []
        if described and (not is_of_these or None in states):
            self._say_begins_anew(described)
            states = []
        begun = [state for state in self.states_of(model) if state not in states]
        if begun:
            first = lambda: [value.numpy() for state in begun for value in state.initial()]  # noqa: E731
            self.memory.distribute(begun, lambda number: [first()] * number)
        if states:
            count = sum(len(state.specs) for state in states)
            saved = [list(arrays[start : start + count]) for start in range(0, len(arrays), count)]
            of = lambda number: saved if number == len(saved) else [self._shared(states, saved, number)] * number  # noqa: E731
            self.memory.distribute(states, of)

    def _shared(self, states: Sequence[Kept], saved: Sequence[Sequence[np.ndarray]], number: int) -> list[np.ndarray]:
        """Returns the state of each of `number` replicas, made of that of another number of them.

        It is the mean of floats, so that the mean over all replicas stays, and the first replica's of other dtypes.
        """
        del states, number
        means = []
        for arrays in zip(*saved, strict=True):
            # State of updates is the same everywhere, and its mean might be rounded.
            differs = any(not np.array_equal(arrays[0], each) for each in arrays)
            is_float = differs and tf.as_dtype(arrays[0].dtype).is_floating
            means.append(np.mean(arrays, axis=0).astype(arrays[0].dtype) if is_float else arrays[0])
        return means

    def _say_begins_anew(self, described: Any) -> None:
        _log.say(
            "transforms: the checkpoint has the state of other variables, or of other transforms, "
            f"{', '.join(described.get('transforms', ()))}; it begins anew"
        )

    def states_of(self, model: keras.Model) -> list[Kept]:
        """Returns the states for gradients of a model, in an order that is the same in all runs of one program."""
        found = []
        for number, optimizer in enumerate(optimizers_of(model)):
            for state in self._kept.get(optimizer, {}).values():
                state.key = (state.key[0], number, state.key[2])
                found += [state] if state.specs else []
        return sorted(found, key=lambda state: state.key)

    def _again(self, optimizers: Sequence[Any], described: Sequence[Any]) -> list[Any]:
        """Returns the states of a checkpoint, which are made where there are none yet; None for one that can't be."""
        found: list[Any] = []
        for where, number, of, indices, kinds in described:
            trained = trained_by(optimizers[of]) if of < len(optimizers) else ()
            if number >= len(self.list) or self.list[number].where != where or max(indices) >= len(trained):
                return [None]
            variables = [trained[index] for index in indices]
            state = self._state_of(number, self.list[number], optimizers[of], variables)
            state.key = (number, of, tuple(indices))
            found.append(state if [_kind(spec) for spec in state.specs] == kinds else None)
        return found


def transforms_of(strategy: Any) -> Transforms:
    """Returns the transforms of a strategy."""
    return getattr(getattr(strategy, "distribution", None), "transforms", None) or _NONE


class ProcessMemory(Memory):
    """State in the variables of this process, one set for each of its replicas.

    Args:
      strategy: the strategy.
      exchange: carries arrays from one worker to all (`num_workers`, `index`, `broadcast`; see
        `transport.sums.Messages`); None if there is one worker.
    """

    def __init__(self, strategy: Any, exchange: Any = None) -> None:
        self._strategy = weakref.proxy(strategy)
        self._exchange = exchange

    def replica(self) -> Any:
        """See `Memory`."""
        return replicas.in_sync_group(self._strategy, self._index())

    def _index(self) -> int:
        context = tf.distribute.get_replica_context()
        return replicas.current() if self._count > 1 and context is not None else 0

    @property
    def _devices(self) -> Sequence[Any]:
        return self._strategy.extended.worker_devices

    @property
    def _count(self) -> int:
        return len(self._devices)

    def _variables(self, state: Kept, index: int) -> list[tf.Variable]:
        if index not in state.held:
            with tf.init_scope(), replicas.on_device(self._devices[index]):
                made = [variable_of_process(value, "transform") for value in state.initial()]
            state.held[index] = made
        return state.held[index]

    def read(self, state: Kept) -> list[tf.Tensor]:
        """See `Memory`."""
        return [variable.read_value() for variable in self._variables(state, self._index())]

    def write(self, state: Kept, values: Sequence[tf.Tensor], is_only: bool) -> None:
        """See `Memory`."""
        is_of_all = is_only and state.transform.where == UPDATE
        for index in range(self._count) if is_of_all else [self._index()]:
            for variable, value in zip(self._variables(state, index), values, strict=True):
                variable.assign(value, read_value=False)

    def collect(self, states: Sequence[Kept]) -> list[list[np.ndarray]]:
        """See `Memory`; all workers call it at the same place."""
        own = [
            [variable.numpy() for state in states for variable in self._variables(state, index)]
            for index in range(self._count)
        ]
        if self._exchange is None:
            return own
        found = []
        for source in range(self._exchange.num_workers):
            arrays = self._exchange.broadcast([array for each in own for array in each], source)
            # Only the first worker keeps what it gets.
            found += [] if self._exchange.index else _divided(arrays, self._count)
        return found

    def distribute(self, states: Sequence[Kept], values: Callable[[int], Sequence[Sequence[np.ndarray]]]) -> None:
        """See `Memory`; all workers call it."""
        count, workers = self._count, self._exchange.num_workers if self._exchange else 1
        index = self._exchange.index if self._exchange else 0
        empty = [[np.zeros(spec.shape, spec.dtype.as_numpy_dtype) for state in states for spec in state.specs]] * count
        given = empty if index else values(count * workers)
        for target in range(workers):
            arrays = [array for each in given[target * count : (target + 1) * count] for array in each]
            if self._exchange:
                arrays = self._exchange.broadcast(arrays or [array for each in empty for array in each], 0)
            if target == index:
                for replica, own in enumerate(_divided(arrays, count)):
                    variables = [variable for state in states for variable in self._variables(state, replica)]
                    for variable, array in zip(variables, own, strict=True):
                        variable.assign(array)


class _WorkerMemory(ProcessMemory):
    """State in the variables of this worker, one set, in any context."""

    def __init__(self, exchange: Any) -> None:
        self._exchange = exchange

    _devices: Sequence[Any] = (None,)

    def _index(self) -> int:
        return 0


class ErrorFeedback(Transforms):
    """Sums gradients over workers by a codec, whose state on each worker is that of a transform.

        gradients of this worker, weighed by its examples
            --> exchange(gradients, state, transport) --> sums over the workers, the same on all
                                                      --> the new state, of this worker alone

    What is in the state depends on the codec; most keep of each gradient what they have not sent so far. If there are
    more or fewer workers than when a checkpoint was written, all get equal parts of that, so that nothing is lost.

    Args:
      codec: a `tfdist.compression.Codec`.
      transport: carries the state of one worker to all; see `ProcessMemory` for what it has.
      memory: of the state; by default the process of each worker.
      exchange: in place of `codec.exchange`.

    Attributes:
      codec: the same.
    """

    def __init__(
        self,
        codec: Any,
        transport: Any = None,
        memory: Memory | None = None,
        exchange: Callable[..., Any] | None = None,
    ) -> None:
        def init(variables: Sequence[Any]) -> Any:
            return codec.init([tf.TensorSpec(each.shape, each.dtype) for each in variables])

        # The third argument, elsewhere `Info`, is the transport.
        update = exchange or codec.exchange
        both = [GradientTransform(init, update, REPLICA, f"{codec!r}, {kind}") for kind in _KINDS]
        super().__init__(both, memory or _WorkerMemory(transport))
        self.codec, self._transport = codec, transport

    def sum(
        self,
        optimizer: Any,
        gradients: Sequence[tf.Tensor],
        variables: Sequence[Any],
        transport: Any,
        kind: str = GRADIENTS,
        is_scaled: bool = True,
    ) -> list[tf.Tensor]:
        """Returns the sums over the workers; all call it with gradients of the same variables.

        Args:
          optimizer: the Keras optimizer that will apply the sums.
          gradients: dense gradients of static shapes.
          variables: the variable of each.
          transport: of the codec's messages (`tfdist.compression.codec.Transport`).
          kind: of `_KINDS`.
          is_scaled: True if gradients have the scale of a `LossScaleOptimizer`, if the optimizer is one. State is kept
            without the scale, because it changes; differences have none.
        """
        if not gradients:
            return []
        indices, number = indices_of(optimizer, variables), _KINDS.index(kind)
        # One state, also where another loop gives them in another order.
        order = sorted(range(len(indices)), key=lambda position: indices[position])
        # What keeps nothing sends gradients with their scale, which is for the range of float16.
        of = [variables[each] for each in order]
        keeps = self._state_of(number, self.list[number], optimizer, of).specs
        scale = loss_scale_of(optimizer) if is_scaled and kind == GRADIENTS and keeps else None
        given = _in_unit([gradients[each] for each in order], 1, scale)
        sums = self._applied(number, self.list[number], optimizer, given, of, transport, False, None)
        in_order = dict(zip(order, sums, strict=True))
        return [_back(in_order[index], 1, scale, each.dtype, None) for index, each in enumerate(gradients)]

    def sum_all(self, transport: Any, optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Does the same where some gradients are None, which stays, or rows, which are sent as they are.

        In replica context, or in cross-replica context if all gradients are dense.
        """
        return sum_dense_by(lambda dense, of: self.sum(optimizer, dense, of, transport), gradients, variables)

    def collect(self, model: keras.Model) -> tuple[Any, list[np.ndarray]]:
        """See `Transforms.collect`."""
        described, arrays = super().collect(model)
        return described and {**described, "codec": repr(self.codec)}, arrays

    def _shared(self, states: Sequence[Kept], saved: Sequence[Sequence[np.ndarray]], number: int) -> list[np.ndarray]:
        names = [(state.key[0], name.split("/")[0]) for state in states for name in sorted(state.structure)]
        shared = []
        for (kind, name), arrays in zip(names, zip(*saved, strict=True), strict=True):
            # A gradient's sum must stay; the sum of differences is divided by the number of workers that there are.
            parts = number if _KINDS[kind] == GRADIENTS else len(arrays)
            is_unsent = name in self.codec.unsent
            shared.append((np.sum(arrays, axis=0) / parts).astype(arrays[0].dtype) if is_unsent else arrays[0])
        return shared

    def _say_begins_anew(self, described: Any) -> None:
        if self._transport is None or not self._transport.index:
            what = repr(self.codec) if repr(self.codec) != described["codec"] else "for other variables; it"
            _log.say(f"Compression: the checkpoint has the state of {described['codec']}, {what} begins anew")


_KINDS = (GRADIENTS, DIFFERENCES)
_NONE = Transforms(())


def _divided(arrays: Sequence[Any], count: int) -> list[list[Any]]:
    size = len(arrays) // count
    return [list(arrays[start : start + size]) for start in range(0, len(arrays), size)]


def _specs_of(transform: GradientTransform, variables: Sequence[Any]) -> Any:
    """Returns the structure of a transform's state, of specs."""

    def spec(leaf: Any) -> tf.TensorSpec:
        return tf.TensorSpec(leaf.shape, leaf.dtype)

    # In a graph that is dropped: large states are not allocated for it.
    with tf.init_scope():
        traced = tf.function(lambda: transform.init(variables), autograph=False).get_concrete_function()
    return tf.nest.map_structure(spec, traced.structured_outputs)


def _kind(spec: tf.TensorSpec) -> list[Any]:
    return [list(spec.shape), spec.dtype.name]


def _in_unit(gradients: Sequence[Any], unit: Any, scale: Any) -> list[Any]:
    """Returns gradients in the unit of one device; in float32 without a scale, for which half precision has no room."""
    if scale is None:
        return list(gradients) if _is_one(unit) else gradient_transforms.scaled(gradients, unit)
    factor = tf.cast(unit, tf.float32) / tf.cast(scale, tf.float32)
    return [gradient_transforms.map_values(lambda v: tf.cast(v, tf.float32) * factor, each) for each in gradients]


def _is_one(unit: Any) -> bool:
    return isinstance(unit, int | float) and unit == 1


def _back(gradient: Any, unit: Any, scale: Any, dtype: tf.DType, is_finite: Any) -> Any:
    """Returns a gradient in the unit in which it was given, and NaN if with a scale the given ones weren't finite."""
    if scale is None and _is_one(unit):
        return gradient
    if scale is None:
        return gradient_transforms.map_values(lambda v: tf.math.divide_no_nan(v, tf.cast(unit, v.dtype)), gradient)
    factor = tf.math.divide_no_nan(tf.cast(scale, tf.float32), tf.cast(unit, tf.float32))
    factor = factor if is_finite is None else tf.where(is_finite, factor, float("nan"))
    return gradient_transforms.map_values(lambda v: tf.cast(v * factor, dtype), gradient)


def _check_result(transform: GradientTransform, given: Sequence[Any], found: Any, state: Kept, after: Any) -> None:
    """Raises ValueError if a transform returns other gradients, or another state, than it was given."""

    def refuse(wanted: str, received: Any) -> None:
        raise ValueError(f"transforms: update of {transform!r} must return {wanted}. Received: {received!r}")

    if not isinstance(found, list | tuple) or len(found) != len(given):
        refuse(f"{len(given)} gradients, one for each", found)
    for before, new, variable in zip(given, found, state.variables, strict=True):
        if getattr(new, "dtype", None) != before.dtype or not _has_shape(new, variable.shape):
            refuse(f"a gradient of {variable.path!r}, {before.dtype.name}{list(variable.shape)}", new)
    try:
        tf.nest.assert_same_structure(state.structure, after, expand_composites=False)
    except (ValueError, TypeError):
        refuse(f"a state of the structure {state.structure!r}", after)
    for spec, leaf in zip(state.specs, tf.nest.flatten(after), strict=True):
        if not spec.is_compatible_with(tf.convert_to_tensor(leaf)):
            refuse(f"a state of {spec!r}", leaf)


def _has_shape(gradient: Any, shape: Any) -> bool:
    """Returns True if a gradient may be one of a variable of this shape, as far as it is known."""
    whole = tf.TensorShape(shape)
    if isinstance(gradient, tf.IndexedSlices):
        return whole[1:].is_compatible_with(gradient.values.shape[1:])
    return whole.is_compatible_with(gradient.shape)
