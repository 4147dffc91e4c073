# SPDX-License-Identifier: Apache-2.0
"""The programs of functions given to `strategy.run`: each is traced once for each kind of arguments and feed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.compat import cluster_joining, fresh_threads
from tfdist.engines.parameter_server import batch_arguments, worker_batch
from tfdist.engines.parameter_server.accumulation import Accumulation
from tfdist.engines.parameter_server.program import Program
from tfdist.engines.parameter_server.transfer.plan import TransferPlan
from tfdist.engines.parameter_server.worker_data import WorkerIterator
from tfdist.step import function_keys, keras_steps, rehearsal, replica_placement


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
        self._of_loops: dict[Any, Any] = {}
        self._functions = function_keys.Traced()
        self._counter: tf.Variable | None = None
        self.accumulates = True

    def kept_for(self, fn: Callable[..., Any]) -> dict[Any, Any]:
        """Returns the cache of traces of `fn`: the model's own for a step of Keras, else one for all custom loops."""
        kept = keras_steps.traced_with(fn)
        return self._of_loops if kept is None else kept

    def find(
        self,
        kind: str,
        fn: Callable[..., Any],
        args: tuple,
        kwargs: dict[str, Any],
        iterator: WorkerIterator | None,
        in_parts: bool,
    ) -> Program:
        """Returns the program for a call outside of graphs; traces it if it is new.

        Args:
          kind: see `keras_steps.classify`.
          fn: the function.
          args: its positional arguments.
          kwargs: its keyword arguments.
          iterator: the pass that the batch is read from; None if the batch is among the arguments.
          in_parts: see `Program`.
        """
        worker_fed = iterator is not None and batch_arguments.takes_batches_itself(kind, iterator)
        specs = tf.nest.map_structure(batch_arguments.spec_of, (args, kwargs))
        programs, makes_several = self.kept_for(fn), keras_steps.steps_per_execution(fn) > 1
        key = function_keys.key_of(fn), worker_fed, in_parts, repr(specs), makes_several
        if key not in programs:
            self.rehearse(fn, args, kwargs)
            programs[key] = self.trace(fn, args, kwargs, worker_fed, in_parts)
            self._functions.note(fn, programs, key)
        return programs[key]

    def rehearse(self, fn: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> None:
        """Creates the variables that the first call of `fn` would create."""
        rehearsal.before(self._strategy, fn, *worker_batch.as_specs(list(args), kwargs))
        replica_placement.check_step(self._strategy, fn)

    def trace(
        self, fn: Callable[..., Any], args: tuple, kwargs: dict[str, Any], worker_fed: bool, in_parts: bool
    ) -> Program:
        """Traces `fn`; see `Program` for the arguments."""
        optimizer, accumulation = keras_steps.accumulates(fn), None
        if optimizer is not None and self.accumulates:
            kept, key = self.kept_for(fn), ("accumulation", optimizer)
            accumulation = kept.get(key) or kept.setdefault(key, Accumulation(self._coordinator, optimizer))
        counter = self._count_of_updates() if keras_steps.steps_per_execution(fn) > 1 else None
        return Program(self._strategy, fn, args, kwargs, worker_fed, in_parts, accumulation, self._transfer, counter)

    def _count_of_updates(self) -> tf.Variable:
        """Returns the number of updates of all workers, on a parameter server; made when it is first needed."""

        def make() -> tf.Variable:
            with tf.device(cluster_joining.SERVER_DEVICE):
                return tf.Variable(0, dtype=tf.int64, trainable=False, name="updates")

        if self._counter is None:
            # Not one of the model's variables: the caller may be in the strategy's scope, or in a graph.
            self._counter = fresh_threads.call(make)
        return self._counter
