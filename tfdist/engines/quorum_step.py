# SPDX-License-Identifier: Apache-2.0
"""The traced pieces of a train step whose gradients are added up by all-reduce, of those who have arrived.

    contribute    in a thread of its own, without collectives: a contribution, as flat tensors
    nothing       the same tensors, of zeros and without rows: what a worker gives that has not arrived
    update        in Keras' thread, on all workers at once: adds up what they give, and applies the sum

A contribution travels from the one to the other as a `Ticket`, the element of the data set that Keras iterates.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import composite_tensor

from tfdist.engines import as_one, sharing, tap
from tfdist.engines.contribution import Contribution, TrainStep

Sum = Callable[[Sequence[tf.Tensor]], list[tf.Tensor]]

# Above this a copy costs more than a ring of its own: 4 workers with 1M parameters made 12.2 steps/s packed, 9.6 not.
_PACKED_BYTES = 2**26

_numbers = itertools.count()
_steps: weakref.WeakValueDictionary[int, QuorumStep] = weakref.WeakValueDictionary()


class QuorumStep:
    """A Keras train step, traced for a `MultiWorkerMirroredStrategy` of one replica per worker.

    Args:
      strategy: the strategy.
      step: a model's bound `train_step`, whose optimizers were built.
      element_spec: of a `QuorumDataset`'s part.
      sum_over_workers: sums tensors over all workers, in cross-replica context.

    Attributes:
      nothing: what a worker gives that has not arrived: flat tensors.
    """

    def __init__(
        self, strategy: tf.distribute.Strategy, step: Callable[..., Any], element_spec: Any, sum_over_workers: Sum
    ) -> None:
        self._strategy = strategy
        self._sum_over_workers = sum_over_workers
        self._replica = strategy.extended._get_replica_id_in_sync_group(0)
        self._device = strategy.extended.worker_devices[0]
        count = strategy.num_replicas_in_sync
        self._user_step = step
        self._step = TrainStep(step, count, loss_divisor=1 if as_one.has_own_loss(step) else count)
        self._template: Contribution | None = None
        self._contribute = self._trace([tf.data.IteratorSpec(element_spec)])
        self._specs = [tf.TensorSpec(output.shape, output.dtype) for output in self._contribute.outputs[1:]]
        self.nothing = [_nothing(spec) for spec in self._specs]
        self.number = next(_numbers)
        _steps[self.number] = self

    def contribute(self, iterator: Any) -> tuple[list[tf.Tensor], int]:
        """Computes a contribution from the next batch of an iterator; returns it flat, and its number of examples.

        Raises:
          tf.errors.OutOfRangeError: the data are at their end.
        """
        examples, *flat = self._contribute(iterator)
        # To read it is to wait for the device.
        return flat, int(examples.numpy())

    def ticket(self, flat: Sequence[tf.Tensor]) -> Ticket:
        """What Keras' loop takes to the update."""
        return Ticket(TicketSpec(self.number, self._specs), flat)

    def update(self, ticket: Ticket) -> Any:
        """Makes an update from what all workers give; in cross-replica context, in a graph or eagerly.

        Returns:
          What Keras' step returns, for all workers together.
        """
        own = self._pack(ticket.flat)
        # This worker's own counts so far: what all count together is added up along with the gradients.
        counters = [_local(variable) for variable in self._step.counters]
        counts = [counter + tf.cast(count, counter.dtype) for counter, count in zip(counters, own.counts, strict=True)]
        total = self._add_up(own._replace(counts=counts))
        with self._as_replica(), tap.attributes(self._without_reduction()):
            self._step.update(total)
            for counter, count in zip(counters, counts, strict=True):
                counter.assign(count)
            return self._step.logs(total, total.counts)

    def _add_up(self, own: Contribution) -> Contribution:
        is_sparse = [isinstance(gradient, tf.IndexedSlices) for gradient in own.gradients]
        dense = own._replace(gradients=[g for g, sparse in zip(own.gradients, is_sparse, strict=True) if not sparse])
        sums = tf.nest.pack_sequence_as(dense, self._sum_dense(tf.nest.flatten(dense)))
        rest = iter(sums.gradients)
        gradients = [
            self._add_up_rows(gradient, variable.shape) if sparse else next(rest)
            for gradient, variable, sparse in zip(own.gradients, self._step.variables(), is_sparse, strict=True)
        ]
        return sums._replace(gradients=gradients)

    def _sum_dense(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Sums small tensors in one collective for all, and each large one in its own: to pack it would copy it."""
        is_small = [tensor.shape.num_elements() * tensor.dtype.size < _PACKED_BYTES for tensor in tensors]
        small = iter(self._sum_over_workers([t for t, fits in zip(tensors, is_small, strict=True) if fits]))
        return [
            next(small) if fits else self._sum_over_workers([tensor])[0]
            for tensor, fits in zip(tensors, is_small, strict=True)
        ]

    def _add_up_rows(self, gradient: tf.IndexedSlices, shape: Sequence[int]) -> tf.IndexedSlices:
        with tf.device(self._device):
            own = tf.nest.map_structure(tf.identity, gradient, expand_composites=True)
            rows = tf.distribute.Strategy.reduce(self._strategy, "SUM", own, axis=None)
            return tf.IndexedSlices(rows.values, rows.indices, tf.constant(list(shape), rows.indices.dtype))

    def _without_reduction(self) -> list[tuple[Any, str, Any]]:
        """Has the optimizers take gradients as they are: they were added up already."""
        optimizers = tap.optimizers_of(self._step.model)
        inner = [getattr(optimizer, "inner_optimizer", optimizer) for optimizer in optimizers]
        return [(each, "_all_reduce_sum_gradients", lambda pairs: pairs) for each in inner]

    def _trace(self, specs: Sequence[Any]) -> Callable[..., Any]:
        traced = tf.function(self._contribute_next, autograph=False)
        with self._strategy.scope():
            return self._step.settled(lambda: traced.get_concrete_function(*specs))

    def _contribute_next(self, iterator: Any) -> list[tf.Tensor]:
        batch, total = iterator.get_next()
        with self._as_replica(), as_one.counted_as_one(self._strategy, self._user_step):
            contribution = self._step.contribute(batch, total if tf.is_tensor(total) else None)
        # The shape of a whole table is no number that adds up.
        rows_only = [_without_shape(gradient) for gradient in contribution.gradients]
        contribution = self._template = contribution._replace(gradients=rows_only)
        flat = tf.nest.flatten(contribution, expand_composites=True)
        examples = sharing.rows(batch)
        # Counted once all else is there, so that reading the count is waiting for the rest.
        with tf.control_dependencies(flat):
            count = tf.constant(0, tf.int64) if examples is None else tf.identity(examples)
        return [count, *flat]

    @contextlib.contextmanager
    def _as_replica(self) -> Iterator[None]:
        with tf.device(self._device), tf.distribute.ReplicaContext(self._strategy, self._replica):
            yield

    def _pack(self, flat: Sequence[tf.Tensor]) -> Contribution:
        return tf.nest.pack_sequence_as(self._template, flat, expand_composites=True)


class Ticket(composite_tensor.CompositeTensor):
    """What this worker gives to one update. It stands for a batch in `strategy.run(model.train_step, (ticket,))`.

    Args:
      spec: whose it is.
      flat: a contribution, as flat tensors.
    """

    def __init__(self, spec: TicketSpec, flat: Sequence[tf.Tensor]) -> None:
        self._spec = spec
        self.flat = list(flat)

    @property
    def _type_spec(self) -> TicketSpec:
        return self._spec

    @property
    def step(self) -> QuorumStep:
        """The step that it is for."""
        return _steps[self._spec.number]


class TicketSpec(tf.TypeSpec):
    """The type of a ticket: the same whether this worker has arrived or not, so that one trace serves both.

    Args:
      number: of the `QuorumStep`.
      specs: of the flat tensors.
    """

    def __init__(self, number: int, specs: Sequence[tf.TensorSpec]) -> None:
        self.number = number
        self.specs = tuple(specs)

    @property
    def value_type(self) -> type[Ticket]:
        """See `tf.TypeSpec`."""
        return Ticket

    def _serialize(self) -> tuple[int, tuple[tf.TensorSpec, ...]]:
        return self.number, self.specs

    @property
    def _component_specs(self) -> list[tf.TensorSpec]:
        return list(self.specs)

    def _to_components(self, value: Ticket) -> list[tf.Tensor]:
        return value.flat

    def _from_components(self, components: Sequence[tf.Tensor]) -> Ticket:
        return Ticket(self, components)


def _without_shape(gradient: Any) -> Any:
    is_sparse = isinstance(gradient, tf.IndexedSlices)
    return tf.IndexedSlices(gradient.values, gradient.indices) if is_sparse else gradient


def _nothing(spec: tf.TensorSpec) -> tf.Tensor:
    # Only rows of sparse gradients are of unknown number, and of these there are none.
    return tf.zeros([size or 0 for size in spec.shape], spec.dtype)


def _local(variable: Any) -> Any:
    """This worker's copy of a Keras variable."""
    return variable.value.values[0] if hasattr(variable.value, "values") else variable.value
