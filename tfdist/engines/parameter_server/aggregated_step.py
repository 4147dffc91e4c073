# SPDX-License-Identifier: Apache-2.0
"""Traced functions of a train step whose gradients are aggregated on the parameter servers.

    contribute    on a worker                    reads the variables, computes; the result stays there
    push          worker to parameter servers    each gradient to the server of its variable; the result stays there
    update        on the parameter servers       adds up what was pushed, and applies it

They exchange handles: the chief's references to remote tensors. Gradients are summed only after the policy has chosen
the contributors, so a worker that dies during a push leaves unused handles, and no partial sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.compat import closures, following_devices, replica_parts
from tfdist.compat.cluster_joining import SERVER_DEVICE
from tfdist.data import splitting
from tfdist.engines.parameter_server import coordinated_variable, scope_checks
from tfdist.engines.parameter_server.partitioned_variable import RowPieces
from tfdist.engines.parameter_server.transfer import encoding
from tfdist.engines.parameter_server.transfer.bundles import Bundles
from tfdist.engines.parameter_server.transfer.plan import TransferPlan
from tfdist.step import one_replica
from tfdist.step.contribution import Contribution, add_up, weigh
from tfdist.step.packing import Packing
from tfdist.step.split_train_step import SplitTrainStep


class AggregatedStep:
    """A Keras train step, traced for a `ParameterServerStrategy`.

    Args:
      strategy: the strategy in whose scope it is traced.
      step: a model's bound `train_step`.
      transfer: how variables and gradients cross the network.
      element_spec: the structure of `tf.TypeSpec`s of a worker's batch.
      total_num_replicas: number of parts of a batch.
      replicas_to_aggregate: expected number of contributions of an update. An update from another number is traced on
        first use, which waits for every worker that is up, even if it is stopped.
      is_weighted: True if the gradients of each contribution have a weight.
      is_relative: see `SplitTrainStep`.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        step: Callable[..., Any],
        transfer: TransferPlan,
        element_spec: Any,
        total_num_replicas: int,
        replicas_to_aggregate: int,
        is_weighted: bool = False,
        is_relative: bool = False,
    ) -> None:
        self._strategy = strategy
        self._transfer = transfer
        # Of the gradients that are sent; None to send them as they are.
        self._encoding = transfer.encoding
        self._spec = element_spec
        self._step = SplitTrainStep(step, total_num_replicas, is_relative=is_relative, can_take_maxima=True)
        self._is_weighted = is_weighted
        self._template: Contribution | None = None
        self._bundles: Bundles | encoding.EncodedBundles | None = None
        self._rows = RowPieces([], [])
        self._home = ""
        self._from_batch: Callable[..., Any] | None = None
        self._from_iterator = self._step.settled(
            lambda: self._trace(self._contribute_next, [tf.data.IteratorSpec(element_spec)])
        )
        scope_checks.check_graph(step, self._from_iterator)
        self._specs = [tf.TensorSpec(t.shape, t.dtype) for t in self._from_iterator.outputs]
        self._push = self._trace(self._to_servers, self._specs)
        self._packing = Packing()
        # By the number of contributions.
        self._updates: dict[int, Callable[..., Any]] = {}
        self._update_from(replicas_to_aggregate)

    @property
    def model(self) -> Any:
        """The Keras model of the step."""
        return self._step.model

    @property
    def dtypes(self) -> list[tf.DType]:
        """The dtypes of the flat logs."""
        return self._packing.dtypes

    def rebuild(self, flat: Sequence[Any]) -> Any:
        """Packs flat logs into what Keras' step returns."""
        return self._packing.rebuild(flat)

    def contribute(self, iterator: Any) -> list[tf.Tensor]:
        """Computes a contribution from a worker's next batch, on the default device, which is the worker."""
        return self._from_iterator(iterator)

    def contribute_from(self, batch: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Computes a contribution from a flat batch of the chief, on the default device, which is the worker."""
        if self._from_batch is None:
            raise RuntimeError("contribute_from() before prepare_for_batches()")
        return self._from_batch(*batch)

    def prepare_for_batches(self) -> None:
        """Traces the function of `contribute_from`; only Keras' thread may call it."""
        if self._from_batch is None:
            specs = tf.nest.flatten(self._spec, expand_composites=True)
            self._from_batch = self._step.settled(lambda: self._trace(self._contribute_batch, specs))

    def push(self, contribution: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Sends a contribution from its worker, the default device, to the parameter servers."""
        if self._encoding is None:
            return self._push(*contribution)
        *pushed, sent = self._push(*contribution)
        self._encoding.count(closures.this_worker(), int(sent.numpy()))
        return pushed

    def update(
        self, contributions: Sequence[Sequence[tf.Tensor]], weights: Sequence[float] | None = None
    ) -> list[np.ndarray]:
        """Makes an update from contributions that were pushed, and returns the flat logs after it.

        Args:
          contributions: results of `push`.
          weights: factors of each contribution's gradients, if `is_weighted`.
        """
        update = self._update_from(len(contributions))
        tensors = [tensor for each in contributions for tensor in each]
        with tf.device(self._home):
            if self._is_weighted:
                tensors.append(tf.constant(weights, tf.float32, [len(contributions)]))
            return self._packing.unpack(update(*tensors))

    def _update_from(self, count: int) -> Callable[..., Any]:
        if count not in self._updates:
            weights = [tf.TensorSpec([count], tf.float32)] if self._is_weighted else []
            self._updates[count] = self._trace(self._update, self._specs * count + weights)
        return self._updates[count]

    def _trace(self, function: Callable[..., Any], specs: Sequence[Any]) -> Callable[..., Any]:
        return one_replica.trace(self._strategy, function, specs)

    # What is traced.

    def _contribute_next(self, iterator: Any) -> list[tf.Tensor]:
        return self._contribute(iterator.get_next())

    def _contribute_batch(self, *flat: tf.Tensor) -> list[tf.Tensor]:
        return self._contribute(tf.nest.pack_sequence_as(self._spec, flat, expand_composites=True))

    def _contribute(self, batch: Any) -> list[tf.Tensor]:
        worker = self._strategy.extended.worker_devices[0]
        with self._as_replica(worker), self._transfer.contributing(self.model, worker):
            rows = splitting.rows(batch)
            with coordinated_variable.watched(self._step.written_past_keras):
                contribution = following_devices.of_strategy(self._strategy, self._step.contribute)(batch)
        contribution = self._transfer.placed(contribution, rows)
        if self._encoding is not None:
            with self._as_replica(worker):
                gradients = encoding.unscaled(contribution.gradients, self._step.targets())
            contribution = contribution._replace(gradients=gradients)
        self._rows = RowPieces(contribution.gradients, self._step.targets())
        with self._as_replica(worker):
            contribution = contribution._replace(gradients=self._rows.split(contribution.gradients))
        self._place(contribution)
        return self._bundles.pack(tf.nest.flatten(contribution, expand_composites=True))

    def _place(self, contribution: Contribution) -> None:
        """Chooses the devices of a contribution: those of the variables and shards, and the first one for the rest."""
        self._template = contribution
        self._home = (self._rows.devices or [SERVER_DEVICE])[0]
        flat = tf.nest.flatten(contribution, expand_composites=True)
        destinations = self._destinations(contribution)
        if self._encoding is None:
            self._bundles = self._transfer.bundles(flat, destinations, replica_parts.homes_of(self._strategy, flat))
            return
        groups = self._encoding.groups(contribution.gradients, self._rows.targets, self._rows.devices)
        self._bundles = encoding.EncodedBundles(self._encoding, groups, flat, destinations, self._transfer.bundles)

    def _destinations(self, contribution: Contribution) -> list[str]:
        destinations: list[str] = []
        for gradient, device in zip(contribution.gradients, self._rows.devices, strict=True):
            destinations += [device] * len(tf.nest.flatten(gradient, expand_composites=True))
        rest = contribution._replace(gradients=[])
        return destinations + [self._home] * len(tf.nest.flatten(rest, expand_composites=True))

    def _to_servers(self, *bundles: tf.Tensor) -> list[tf.Tensor]:
        if not isinstance(self._bundles, encoding.EncodedBundles):
            return self._bundles.send(bundles)
        pushed, sent = self._bundles.send(bundles)
        return [*pushed, sent]

    def _update(self, *flat: tf.Tensor) -> list[tf.Tensor]:
        size = len(self._specs)
        count = (len(flat) - self._is_weighted) // size
        contributions = [self._pack(flat[start : start + size]) for start in range(0, count * size, size)]
        if self._is_weighted:
            weights = tf.unstack(flat[-1], count)
            contributions = [weigh(*each, self._rows.devices) for each in zip(contributions, weights, strict=True)]
        with self._as_replica(self._home):
            total = add_up(contributions, self._rows.devices)
            gradients = total.gradients
            if self._encoding is not None:
                gradients = encoding.scaled(gradients, self._rows.targets, self._rows.devices)
            total = total._replace(gradients=self._rows.joined(gradients))
            self._step.update(total, lambda variable: tf.device(variable.value.device))
            for variable, count in zip(self._step.counters, total.counts, strict=True):
                variable.value.assign_add(tf.cast(count, variable.dtype))
            return self._packing.pack(self._step.logs(total))

    def _as_replica(self, device: str) -> Any:
        return one_replica.replica_on(self._strategy, device)

    def _pack(self, flat: Sequence[tf.Tensor]) -> Contribution:
        return tf.nest.pack_sequence_as(self._template, self._bundles.unpack(flat), expand_composites=True)


def part_of(batch: Sequence[tf.Tensor], spec: Any, part: int, num_parts: int) -> list[tf.Tensor]:
    """Returns a worker's part of a flat batch."""
    whole = tf.nest.pack_sequence_as(spec, batch, expand_composites=True)
    return tf.nest.flatten(splitting.cut(whole, part, num_parts), expand_composites=True)
