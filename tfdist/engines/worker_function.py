# SPDX-License-Identifier: Apache-2.0
"""A step, traced once on the chief, that any worker can run."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.compat.keras import optimizers
from tfdist.compat.tensorflow import coordinator, graphs
from tfdist.compat.tensorflow.coordinator import SERVER_DEVICE
from tfdist.engines.accumulation import Accumulation
from tfdist.engines.transfer import plan
from tfdist.engines.transfer.plan import TransferPlan
from tfdist.passes import splitting, worker_batch
from tfdist.passes.worker_batch import WorkerBatch, handles_in
from tfdist.passes.worker_pass import Batch, Feed
from tfdist.step import gradients, one_replica, rehearsal, step_times
from tfdist.step.logs import Packing
from tfdist.step.step import Step, Traces, key_of_value
from tfdist.tables import coordinated_variable

# About the operations of a perceptron of ten layers with Adam.
_SMALL_STEP_OPERATIONS = 3000
# As much as is traced in about a second.
_SEVERAL_OPERATIONS = 8000


class Program:
    """`fn(*args, **kwargs)` in replica context, as a concrete function of flat tensors.

    The batch comes first: an iterator that lives on the worker, or the batch's tensors. All other tensors among the
    arguments follow.

    Args:
      strategy: The strategy in whose scope `fn` is traced.
      fn: The user's step.
      args: Its positional arguments; tensors and `WorkerBatch`es are placeholders for the values at run time.
      kwargs: Its keyword arguments, likewise.
      worker_fed: True if the batch is read from an iterator on the worker.
      accumulation: Accumulators of the worker's gradients, which are then the last arguments.
      transfer: Form in which variables and gradients cross the network; stock TensorFlow's by default.
      counter: Of the updates of all workers, int64; for a step of which a worker makes several in one closure.

    Attributes:
      run: runs the step on the device of the calling thread; the result stays there (see `fetch`).
      run_silently: the same, without computing its result (see `prepare_silent`).
    """

    # False if the step only accumulates gradients.
    _updates = True
    # Number of steps of `run_several`.
    num_several = 1
    # True once `prepare_silent` was called.
    knows_silence = False
    # Variable that counts the updates of all workers, once `run` is traced; None where it does not tell.
    _counted: Any = None
    # The same step, which accumulates its gradients instead of updating.
    adding: Program | None = None

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        step: Step | Callable[..., Any],
        args: tuple,
        kwargs: dict[str, Any],
        worker_fed: bool,
        accumulation: Accumulation | None = None,
        transfer: plan.TransferPlan | None = None,
        counter: tf.Variable | None = None,
    ):
        self._strategy = strategy
        self._counter = counter
        self._step = step = Step.of(step)
        is_other = step.kind == "other"
        # So that Python's control flow on tensors works as it does eagerly.
        self._fn = graphs.converted(step.function, by_default=True) if is_other else step.function
        self._leaves = tf.nest.flatten((args, kwargs))
        self._arguments = (args, kwargs)
        handles = handles_in(self._leaves)
        self._batch_spec = handles[0].whole_spec if handles else None
        self._worker_fed = worker_fed and self._batch_spec is not None
        # A batch that a custom loop has taken on a worker may be given to a second function.
        self._keeps_batch = self._worker_fed and is_other
        self._packing = Packing()
        self._transfer = transfer or plan.TransferPlan("plain")
        self.accumulation = accumulation
        # Packs a flat result into the structure that `fn` returned.
        self.rebuild = self._packing.rebuild
        self.run = self.run_silently = self._trace(self._on_worker)
        self._several: Any = None
        # By worker, on the parameter server: the number of all updates before and after each of several steps.
        self._counts: dict[int, tf.Variable] = {}
        # True if a run makes one update, which no counter counts, and no batch is kept.
        self.is_plain = accumulation is None and counter is None and not self._keeps_batch
        if accumulation is not None:
            self.adding = self._that_adds()

    @property
    def graph(self) -> tf.Graph:
        """The graph of the traced step."""
        return self.run.graph

    @property
    def dtypes(self) -> list[tf.DType]:
        """The dtypes of the flat result."""
        return self._packing.dtypes

    def flatten_arguments(self, args: tuple, kwargs: dict[str, Any]) -> list[tf.Tensor]:
        """Returns the tensors among the arguments of one call, flat, without the batch."""
        leaves = [
            leaf for leaf in tf.nest.flatten((args, kwargs)) if _is_tensor(leaf) and not isinstance(leaf, WorkerBatch)
        ]
        return tf.nest.flatten(leaves, expand_composites=True)

    def prepare_silent(self) -> None:
        """Traces the step without its result, where that is cheap; only the main thread may call it.

        Not a step that counts updates, whose staleness is a part of the result.

        Reading the metrics for an unused result takes a good part of a small step. In a large step the share is small,
        and a second trace takes long.
        """
        self.knows_silence = True
        is_small = len(self.graph.get_operations()) <= _SMALL_STEP_OPERATIONS
        if self.run_silently is self.run and self._counter is None and not self._keeps_batch and is_small:
            self.run_silently = self._trace(self._for_effects)
        if self.adding is not None:
            self.adding.prepare_silent()

    def prepare_several(self) -> None:
        """Traces several steps in one, without their results, where that is cheap; only the main thread may call it.

        They are not a loop of the graph: its transfers would wait for more signals between the devices than the steps
        themselves have. Nor is there an output, which would wait for a signal from each write. The last step of an
        execution is made by itself (`run`).
        """
        if self.adding is not None:
            self.adding.prepare_several()
            return
        in_a_row, make, counts = self._step.steps_per_execution - 1, self._make_several, [tf.TensorSpec([], "resource")]
        if self.accumulation is not None:
            # Between two updates.
            in_a_row, make, counts = min(in_a_row, self.accumulation.num_steps - 1), self._add_several, []
        count = min(in_a_row, _SEVERAL_OPERATIONS // len(self.graph.get_operations()))
        if self._several is None and count > 1:
            specs = [*counts, *self._input_specs()]
            self._several = one_replica.trace(self._strategy, functools.partial(make, count), specs)
            # The workers' threads look at it: not before the trace is there.
            self.num_several = count

    def run_several(self, *inputs: Any) -> list[int]:
        """Makes `num_several` steps, each with the next batch of the iterator; returns the staleness of each update."""
        if not self._updates:
            self._several(*inputs)
            return []
        worker = coordinator.this_worker()
        if worker not in self._counts:
            with tf.device(SERVER_DEVICE):
                self._counts[worker] = tf.Variable(tf.zeros([self.num_several + 1], tf.int64), trainable=False)
        counts = self._counts[worker]
        self._several(counts.handle, *inputs)
        return (np.diff(counts.numpy()) - 1).tolist()

    def _make_several(self, count: int, counts: tf.Tensor, *inputs: Any) -> list[tf.Tensor]:
        found = [self._count(0)]
        with coordinated_variable.postponed_additions(self._postponable()):
            for _ in range(count):
                begin = _num_operations()
                self._result_of(*inputs)
                found.append(self._count(1, begin))
        with tf.device(SERVER_DEVICE):
            tf.raw_ops.AssignVariableOp(resource=counts, value=tf.stack(found))
        return []

    def _add_several(self, count: int, *inputs: Any) -> list[tf.Tensor]:
        """Adds the gradients of several batches to the worker's sums. All are of the weights that it reads first."""
        worker = self._strategy.extended.worker_devices[0]
        with (
            self._transfer.reading_once(self._step.model, worker),
            coordinated_variable.postponed_additions(self._postponable()),
        ):
            for _ in range(count):
                self._result_of(*inputs)
        return []

    def _postponable(self) -> list[Any]:
        """Returns the variables of metrics, if the steps do nothing with them but add."""
        model = self._step.model
        return model.metrics_variables if rehearsal.has_keras_metrics_only(model) else []

    def _count(self, more: int, begin: int = 0) -> tf.Tensor:
        """Adds to the number of updates of all workers, on its parameter server, and returns it there.

        Args:
          more: what is added.
          begin: index of the step's first operation. The step counts once its writes on that server are made; to wait
            for those on other servers would take signals between them.
        """
        counter: Any = self._counted
        operations = tf.compat.v1.get_default_graph().get_operations()[begin:] if begin else []
        # Of a variable: they take a resource, and return nothing.
        there = [each for each in operations if each.device == counter.device and not each.outputs]
        writes = [each for each in there if any(given.dtype == tf.resource for given in each.inputs)]
        with tf.device(SERVER_DEVICE), tf.control_dependencies(writes):
            # Read at once, and not where the value is used.
            return tf.convert_to_tensor(counter.assign_add(more)) if more else tf.identity(counter.read_value())

    def staleness_in(self, outputs: Sequence[tf.Tensor]) -> list[int | None]:
        """Returns the staleness of the update of `run` or `run_silently`: None if not counted; [] if none was made."""
        if not self._updates:
            return []
        if self._counted is None:
            return [None]
        before, after = outputs[-1].numpy()
        return [max(0, int(after - before - 1))]

    def _that_adds(self) -> Program:
        other = copy.copy(self)
        other._packing, other._updates, other._counter = Packing(), False, None
        other.run = other.run_silently = other._trace(other._on_worker)
        return other

    def fetch(self, outputs: Sequence[tf.Tensor]) -> list[np.ndarray]:
        """Copies the outputs of `run` to the chief, in the order of the flat result."""
        return self._packing.unpack(outputs[: self._packing.num_outputs])

    def batch_in(self, outputs: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
        """Returns the batch of `run`, on its device; empty unless a custom loop may use it again."""
        return outputs[self._packing.num_outputs :] if self._keeps_batch else ()

    def _trace(self, on_worker: Callable[..., list[tf.Tensor]]) -> Callable[..., list[tf.Tensor]]:
        traced = one_replica.trace(self._strategy, on_worker, self._input_specs())
        check_graph(self._step, traced)
        return traced

    def _input_specs(self) -> list[Any]:
        if self._batch_spec is None:
            batch: list[Any] = []
        elif self._worker_fed:
            batch = [tf.data.IteratorSpec(self._batch_spec)]
        else:
            batch = tf.nest.flatten(self._batch_spec, expand_composites=True)
        given = [tf.TensorSpec(t.shape, t.dtype) for t in self.flatten_arguments(*self._arguments)]
        return batch + given + (self.accumulation.specs if self.accumulation else [])

    def _on_worker(self, *inputs: Any) -> list[tf.Tensor]:
        (result, batch), counts = self._counting(*inputs)
        kept = tf.nest.flatten(batch, expand_composites=True) if self._keeps_batch else []
        return self._packing.pack(result) + kept + counts

    def _for_effects(self, *inputs: Any) -> list[tf.Tensor]:
        self._result_of(*inputs)
        return []

    def _counting(self, *inputs: Any) -> tuple[tuple[Any, Any], list[tf.Tensor]]:
        """Returns result and batch, and the numbers of all updates before and after this one, if they are counted."""
        self._counted = self._counter if self._counter is not None else self._iterations()
        if self._counted is None:
            return self._result_of(*inputs), []
        before, begin = self._count(0), _num_operations()
        result = self._result_of(*inputs)
        with tf.device(SERVER_DEVICE):
            return result, [tf.stack([before, self._count(int(self._counter is not None), begin)])]

    def _iterations(self) -> Any:
        """Returns the variable that an optimizer counts all workers' updates in; None if the step makes none."""
        optimizer = getattr(self._step.model, "optimizer", None)
        if self._step.kind != "train" or optimizer is None or not self._updates or self.accumulation is not None:
            return None
        return optimizers.iterations_of(getattr(optimizer, "inner_optimizer", optimizer)).value.stored

    def _result_of(self, *inputs: Any) -> tuple[Any, Any]:
        """Returns the result of `fn`, and its batch."""
        batch, rest = self._take_batch(list(inputs))
        supply = iter(rest)
        leaves = [self._fill(leaf, batch, supply) for leaf in self._leaves]
        args, kwargs = tf.nest.pack_sequence_as(self._arguments, leaves)
        if self.accumulation is None:
            return self._call(args, kwargs), batch
        with self.accumulation.traced(list(supply), self._updates):
            return self._call(args, kwargs), batch

    def _take_batch(self, inputs: list[Any]) -> tuple[Any, list[Any]]:
        if self._batch_spec is None:
            return None, inputs
        if self._worker_fed:
            # A new object of the same iterator: TensorFlow refuses more than 32 reads of one in a trace.
            iterator = tf.nest.map_structure(lambda resource: resource, inputs[0], expand_composites=True)
            return iterator.get_next(), inputs[1:]
        count = len(tf.nest.flatten(self._batch_spec, expand_composites=True))
        return tf.nest.pack_sequence_as(self._batch_spec, inputs[:count], expand_composites=True), inputs[count:]

    def _fill(self, leaf: Any, batch: Any, supply: Iterator[Any]) -> Any:
        if isinstance(leaf, WorkerBatch):
            return leaf.pick(batch)
        if not _is_tensor(leaf):
            return leaf
        if isinstance(leaf, tf.Tensor | tf.TensorSpec):
            return next(supply)
        components = [next(supply) for _ in tf.nest.flatten(leaf, expand_composites=True)]
        return tf.nest.pack_sequence_as(leaf, components, expand_composites=True)

    def _call(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        # A device without a job is on the worker that runs the step.
        worker, kind = self._strategy.extended.worker_devices[0], self._step.kind
        sending = {"train": self._transfer.training, "test": self._transfer.reading}.get(kind)
        model = self._step.model
        transforms = gradients.transforms_of(self._strategy)
        facts = functools.partial(_facts, (args, kwargs))
        with (
            one_replica.replica_on(self._strategy, worker),
            sending(model, worker) if sending else contextlib.nullcontext(),
            transforms.alone(model, facts) if kind == "train" else transforms.refused(self._fn, args, kwargs),
        ):
            fn = self._fn if kind == "other" else tf.autograph.experimental.do_not_convert(self._fn)
            result = fn(*args, **kwargs)
        self._transfer.place()
        return result


def _facts(batch: Any, optimizer: Any, grads: Sequence[Any]) -> dict[str, Any]:
    """Returns what is known of gradients that a worker is about to update with; see `transforms.Info`."""
    counter = optimizers.iterations_of(getattr(optimizer, "inner_optimizer", optimizer)).value

    def staleness() -> tf.Tensor:
        # Without an input it is read when the step begins.
        with tf.control_dependencies(None):
            begun = counter.stored.read_value()
        with tf.control_dependencies(step_times.tensors_of(list(grads))):
            return counter.stored.read_value() - begun

    return {"staleness": staleness, "examples": functools.partial(splitting.rows, batch)}


def _num_operations() -> int:
    return len(tf.compat.v1.get_default_graph().get_operations())


def _is_tensor(leaf: Any) -> bool:
    return tf.is_tensor(leaf) or isinstance(leaf, tf.TypeSpec)


# The programs of functions given to `strategy.run`: each is traced once for each kind of arguments and feed.


class Programs:
    """Traces functions in the scope of a strategy, and keeps the traces.

    Args:
      strategy: the strategy.
      coordinator: creates accumulators on the workers.
      transfer: form in which variables and gradients cross the network.

    Attributes:
      accumulates: True if a worker that accumulates gradients adds up its own; False if the optimizer adds them up.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        coordinator: tf.distribute.coordinator.ClusterCoordinator,
        transfer: TransferPlan,
    ) -> None:
        self._strategy = strategy
        self._coordinator = coordinator
        self._transfer = transfer
        self.traces = Traces()
        self.accumulates = True

    def find(self, step: Step, args: tuple, kwargs: dict[str, Any], feed: Feed | None) -> Program:
        """Returns the program for a call outside of graphs; traces it if it is new.

        `feed` is that of the pass from which the batch is read; None if the batch is among the arguments.
        """
        worker_fed = feed is not None and feed.in_step
        given = tf.nest.map_structure(_as_traced, (args, kwargs))
        if feed is None and step.traces is not None:
            given = self._with_open_sizes(step, given)
        args, kwargs = given
        form = repr(tf.nest.map_structure(lambda leaf: None, given))
        key = worker_fed, step.steps_per_execution > 1, form, *map(_key, tf.nest.flatten(given))
        return self.traces.find(step, key, lambda: self.trace(step, args, kwargs, worker_fed))

    def _with_open_sizes(self, step: Step, given: Any) -> Any:
        """Opens the sizes of a batch that others before had otherwise, as Keras' `train_on_batch` does."""
        before = self.traces.shared(step, "sizes", dict)
        form = repr(tf.nest.map_structure(lambda leaf: getattr(leaf, "dtype", leaf), given))
        leaves = tf.nest.flatten(given)
        before[form] = [
            (new.most_specific_common_supertype([old]) or new) if isinstance(new, tf.TypeSpec) else new
            for new, old in zip(leaves, before.get(form, leaves), strict=True)
        ]
        return tf.nest.pack_sequence_as(given, before[form])

    def trace(self, step: Step, args: tuple, kwargs: dict[str, Any], worker_fed: bool) -> Program:
        """Traces a function, once the variables exist that its first call makes; see `Program` for the arguments."""
        rehearsal.before(self._strategy, step.function, *worker_batch.as_specs(list(args), kwargs))
        optimizer, accumulation = step.accumulating, None
        if optimizer is not None and self.accumulates:
            make = functools.partial(Accumulation, self._coordinator, optimizer)
            accumulation = self.traces.shared(step, ("accumulation", optimizer), make)
        counter = self._count_of_updates if step.steps_per_execution > 1 else None
        return Program(self._strategy, step, args, kwargs, worker_fed, accumulation, self._transfer, counter)

    @functools.cached_property
    def _count_of_updates(self) -> tf.Variable:
        """Number of updates of all workers, on a parameter server."""

        def make() -> tf.Variable:
            with tf.device(coordinator.SERVER_DEVICE):
                return tf.Variable(0, dtype=tf.int64, trainable=False, name="updates")

        # Not one of the model's variables: the caller may be in the strategy's scope, or in a graph.
        return graphs.call_outside(make)


def check_graph(step: Step, traced: Any) -> None:
    """Raises ValueError if `traced`, the concrete function of a step, uses a data set that was made outside of it."""
    fn = step.function
    name = {"predict": "predict_step"}.get(step.kind, getattr(fn, "__name__", str(fn)))
    if any(captured.dtype == tf.variant for captured in traced.captured_inputs):
        raise ValueError(
            f"ParameterServerStrategy: {name} uses a tf.data.Dataset that was made outside of it, where no "
            "worker reads; give it to fit, evaluate or predict together with the other data "
            f"(tf.data.Dataset.zip((data, others))), or make it within {name}. Received: a captured tf.data.Dataset"
        )


# Arguments of `strategy.run`, and the batches among them: their specs, their values, and the step that reads them.


def in_tensors(args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Replaces arrays, of NumPy and others, by tensors, so that a step is not traced for each of their values."""

    def to_tensor(leaf: Any) -> Any:
        is_array = hasattr(leaf, "__array__") and not isinstance(leaf, type)
        is_kept = tf.is_tensor(leaf) or isinstance(leaf, keras.Variable | tf.distribute.DistributedValues)
        return tf.convert_to_tensor(leaf.__array__()) if is_array and not is_kept else leaf

    return tf.nest.map_structure(to_tensor, (args, kwargs))


def _as_traced(leaf: Any) -> Any:
    """Returns what a step is traced for, and the trace keeps: no tensor and no batch."""
    if isinstance(leaf, WorkerBatch):
        return WorkerBatch(leaf.kind)
    is_value = tf.is_tensor(leaf) and not isinstance(leaf, tf.Variable)
    return tf.type_spec_from_value(leaf) if is_value else leaf


def _key(leaf: Any) -> Hashable:
    if isinstance(leaf, np.ndarray):
        return leaf.dtype.str, leaf.shape, leaf.tobytes()
    # Models of one name have one `repr`.
    known = leaf.kind if isinstance(leaf, WorkerBatch) else leaf
    return known if isinstance(known, tf.TypeSpec) else key_of_value(known)


def unused(handles: Sequence[WorkerBatch]) -> Batch | None:
    """Returns the batch of these handles and marks it as used; None if they have several, or it was used before."""
    batches = {handle.batch for handle in handles}
    if len(batches) != 1:
        return None
    (batch,) = batches
    if batch.is_used:
        return None
    batch.is_used = True
    return batch
