# SPDX-License-Identifier: Apache-2.0
"""Traced functions of a train step whose gradients are summed by an all-reduce of the workers that have arrived.

contribute    in a thread of its own, without collectives: a contribution, as flat tensors
nothing       the same tensors, of zeros and without rows: the contribution of a late worker
update        in Keras' step, on all workers at once: sums their contributions, and applies the sum
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdist.compat import optimizer_patches, replicas
from tfdist.data import splitting
from tfdist.data.shares import Sum
from tfdist.step import contribution, copies, global_losses, one_replica, write_order
from tfdist.step.contribution import Contribution
from tfdist.step.split_train_step import SplitTrainStep
from tfdist.transport import buckets


@dataclasses.dataclass(frozen=True)
class Sums:
    """Functions by which a quorum all-reduce sums.

    Attributes:
      of_tensors: sums tensors over all workers, in cross-replica context.
      of_gradients: returns what sums the dense gradients of an optimizer, if they aren't sent as they are.
    """

    of_tensors: Sum
    of_gradients: Callable[[], optimizer_patches.SumGradients | None] = lambda: None


class QuorumStep:
    """A Keras train step, traced for a `MultiWorkerMirroredStrategy` of one replica per worker.

    Args:
      strategy: the strategy.
      step: a model's bound `train_step`, whose optimizers were built.
      element_spec: of a worker's part of a batch, and the number of examples in all parts, or ().
      sums: over all workers.

    Attributes:
      nothing: the contribution of a late worker: flat tensors.
    """

    def __init__(
        self, strategy: tf.distribute.Strategy, step: Callable[..., Any], element_spec: Any, sums: Sums
    ) -> None:
        self._strategy = strategy
        self._sums = sums
        self._replica = replicas.in_sync_group(strategy, 0)
        self._device = strategy.extended.worker_devices[0]
        count = strategy.num_replicas_in_sync
        self._user_step = step
        self._step = SplitTrainStep(step, count, loss_divisor=1 if global_losses.has_own_loss(step) else count)
        self._template: Contribution | None = None
        specs = [tf.data.IteratorSpec(element_spec)]
        self._contribute = self._step.settled(lambda: one_replica.trace(strategy, self._contribute_next, specs))
        self._specs = [tf.TensorSpec(output.shape, output.dtype) for output in self._contribute.outputs[1:]]
        with tf.init_scope():
            self.nothing = [_nothing(spec) for spec in self._specs]

    @property
    def dtypes(self) -> list[tf.DType]:
        """Dtypes of a flat contribution."""
        return [spec.dtype for spec in self._specs]

    def contribute(self, iterator: Any) -> tuple[list[tf.Tensor], int]:
        """Computes a contribution from the next batch of an iterator; returns it flat, and its number of examples.

        Raises:
          tf.errors.OutOfRangeError: the data have ended.
        """
        examples, *flat = self._contribute(iterator)
        # This read waits for the device.
        return flat, int(examples.numpy())

    def update(self, flat: Sequence[tf.Tensor]) -> Any:
        """Makes an update from the contributions of all workers; in cross-replica context, in a graph or eagerly.

        Args:
          flat: this worker's contribution, or `nothing`.

        Returns:
          The result of Keras' step for all workers together.
        """
        for tensor, spec in zip(flat, self._specs, strict=True):
            if not tf.executing_eagerly():
                tensor.set_shape(spec.shape)
        with write_order.writes_after_inputs({self._device: list(flat)}):
            return self._update(flat)

    def _update(self, flat: Sequence[tf.Tensor]) -> Any:
        own = self._pack(flat)
        # This worker's own counts so far: their sum over workers is part of the gradients' all-reduce.
        counters = [copies.copies_of(variable)[0] for variable in self._step.counters]
        counts = [counter + tf.cast(count, counter.dtype) for counter, count in zip(counters, own.counts, strict=True)]
        own, sum_gradients = own._replace(counts=counts), self._sums.of_gradients()
        total = self._add_up_encoded(own, sum_gradients) if sum_gradients else self._add_up(own)
        with self._as_replica(), optimizer_patches.attributes(self._without_reduction()):
            self._step.update(total, are_final=sum_gradients is not None)
            for counter, count in zip(counters, counts, strict=True):
                counter.assign(count)
            return self._step.logs(total, total.counts)

    def _add_up(self, own: Contribution, left_out: Sequence[int] = ()) -> Contribution:
        """Returns the sum over all workers; None for the gradients of these indices."""
        sparse = {index for index, each in enumerate(own.gradients) if isinstance(each, tf.IndexedSlices)}
        dense = [index for index in range(len(own.gradients)) if index not in sparse and index not in left_out]
        rest = own._replace(gradients=[own.gradients[index] for index in dense])
        sums = tf.nest.pack_sequence_as(rest, buckets.sum_in_buckets(tf.nest.flatten(rest), self._sums.of_tensors))
        gradients: list[Any] = [None] * len(own.gradients)
        for index, total in zip(dense, sums.gradients, strict=True):
            gradients[index] = total
        variables = self._step.variables()
        for index in sorted(sparse):
            gradients[index] = self._add_up_rows(own.gradients[index], variables[index].shape)
        return sums._replace(gradients=gradients)

    def _add_up_encoded(self, own: Contribution, sum_gradients: optimizer_patches.SumGradients) -> Contribution:
        """Does the same in two rounds: a codec keeps parts of the gradients that the optimizer is given in the end.

        Where `apply` is in a conditional, gradients are summed as they are: what is sent while no worker applies would
        be lost.
        """
        calls, variables = self._step.calls(), self._step.variables()
        encoded = [
            index
            for index, each in enumerate(own.gradients)
            if isinstance(each, tf.Tensor) and calls[index].flag is None
        ]
        total = self._add_up(own, encoded)
        factors = self._step.factors(total)
        final = [
            contribution.times(given if each is None else each, factor)
            for given, each, factor in zip(own.gradients, total.gradients, factors, strict=True)
        ]
        # Several calls may be equal.
        for call in {id(each): each for each in calls}.values():
            chosen = [index for index in encoded if calls[index] is call]
            given = [final[index] for index in chosen], [variables[index] for index in chosen]
            for index, found in zip(chosen, sum_gradients(call.optimizer, *given), strict=True):
                final[index] = found
        return total._replace(gradients=final)

    def _add_up_rows(self, gradient: tf.IndexedSlices, shape: Sequence[int]) -> tf.IndexedSlices:
        with tf.device(self._device):
            own = tf.nest.map_structure(tf.identity, gradient, expand_composites=True)
            rows = tf.distribute.Strategy.reduce(self._strategy, "SUM", own, axis=None)
            return tf.IndexedSlices(rows.values, rows.indices, tf.constant(list(shape), rows.indices.dtype))

    def _without_reduction(self) -> list[tuple[Any, str, Any]]:
        """Returns patches by which the optimizers don't reduce gradients, which are summed already."""
        optimizers = optimizer_patches.optimizers_of(self._step.model)
        return [change for each in optimizers for change in optimizer_patches.without_all_reduce(each)]

    def _contribute_next(self, iterator: Any) -> list[tf.Tensor]:
        batch, total = iterator.get_next()
        with self._as_replica(), global_losses.counted_as_one(self._strategy, self._user_step):
            contribution = self._step.contribute(batch, total if tf.is_tensor(total) else None)
        # The shape of the table must not be summed.
        rows_only = [_without_shape(gradient) for gradient in contribution.gradients]
        contribution = self._template = contribution._replace(gradients=rows_only)
        flat = tf.nest.flatten(contribution, expand_composites=True)
        examples = splitting.rows(batch)
        # Computed after all other tensors, so that a read of the count waits for them.
        with tf.control_dependencies(flat):
            count = tf.constant(0, tf.int64) if examples is None else tf.identity(examples)
        return [count, *flat]

    @contextlib.contextmanager
    def _as_replica(self) -> Iterator[None]:
        with tf.device(self._device), tf.distribute.ReplicaContext(self._strategy, self._replica):
            yield

    def _pack(self, flat: Sequence[tf.Tensor]) -> Contribution:
        return tf.nest.pack_sequence_as(self._template, flat, expand_composites=True)


def _without_shape(gradient: Any) -> Any:
    is_sparse = isinstance(gradient, tf.IndexedSlices)
    return tf.IndexedSlices(gradient.values, gradient.indices) if is_sparse else gradient


def _nothing(spec: tf.TensorSpec) -> tf.Tensor:
    # Only sparse gradients have an unknown number of rows, which is 0 here.
    return tf.zeros([size or 0 for size in spec.shape], spec.dtype)
