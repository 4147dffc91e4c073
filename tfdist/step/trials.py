# SPDX-License-Identifier: Apache-2.0
"""Tries a user's step with made-up examples, to tell sums over the examples from means.

A step of the user's may take the mean of its losses, or add them up: `tf.reduce_sum(losses) / BATCH`. The replicas'
gradients are averaged in the first case, by their examples, and added up in the second. The step itself tells which:
what it computes from a batch, and from this batch given twice, differs by a factor of 2 or by none. Likewise what it
assigns to a weight is no mean if it depends on the order of the examples.

After a trial each variable has its value of before. A step that made-up examples don't suit is taken for one of means:
one with strings or ragged tensors, or that calls Python.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist import _log
from tfdist.compat.keras import models
from tfdist.compat.keras.optimizers import optimizers_of, patched_attributes
from tfdist.compat.tensorflow import graphs
from tfdist.step import losses, one_replica, rehearsal
from tfdist.step.split import SplitTrainStep
from tfdist.step.step import Step

# Of a step that draws random numbers.
_DRAWS = 4
_RANDOM = re.compile("(Stateless)?(Parameterized)?(Random|Truncated|Multinomial)")
# Random layers, and penalties of weights, move the ratio away from 1 and 2.
_MOST_OF_A_MEAN, _FROM_A_SUM = 1.3, 0.1
_ANSWERS = "sums in steps"


def sums_in(strategy: Any, step: Step, batch: Any, num_replicas: int) -> losses.Sums:
    """Returns the numbers in a train or test step that are sums over its examples.

    Writes a line for gradients that are no means. Call it before the step is traced, alike on all workers.

    Args:
      strategy: the strategy, whose first device computes.
      step: of a model that is built.
      batch: a replica's part, or its specs; only its structure, dtypes and shapes without the first axis count.
      num_replicas: largest number of replicas that share a batch.

    Raises:
      ValueError: the step assigns to a weight what it computes from single examples of its own.
    """
    model = step.model
    overridden = [rehearsal.is_overridden(model, name) for name in ("compute_loss", "compute_metrics")]
    kinds = [type(loss) for loss in models.compiled_losses(model) if isinstance(loss, keras.losses.Loss)]
    overridden += [kind.__call__ is not keras.losses.Loss.__call__ for kind in kinds]
    may_differ = step.is_bound and model.built and (not step.is_of_keras or any(overridden))
    if num_replicas == 1 or not may_differ:
        return losses.NO_SUMS
    known, tried = models.kept_until_compiled(model), (_ANSWERS, getattr(step.function, "__func__", None))
    if tried not in known:
        first, second = (losses.made_up(tf.nest.flatten(batch), losses.EXAMPLES, seed) for seed in range(2))
        if first is None or second is None:
            # Other data may tell.
            return losses.NO_SUMS
        known[tried] = _tried(strategy, step, batch, first, second)
    return known[tried]


def _tried(
    strategy: Any, step: Step, batch: Any, first: Sequence[np.ndarray], second: Sequence[np.ndarray]
) -> losses.Sums:
    assigned, ratios = list[Any](), dict[tuple[str, int], float]()
    try:
        # Variables of the trace may not be those of a graph that is being traced.
        with tf.init_scope():
            of_part, of_whole = _of_sizes(strategy, step, batch, first)
            if of_part.assigned:
                of_first, *states = (of_part(each)[1] for each in (first, [np.roll(e, 1, 0) for e in first], second))
                is_like = functools.partial(np.allclose, rtol=1e-3, atol=1e-5, equal_nan=True)
                assigned = list(zip(of_part.assigned, *(map(is_like, of_first, each) for each in states), strict=True))
            drawn = [of_part(first)[0] for _ in range(2)]
            draws = 1 if np.allclose(*drawn, rtol=1e-3, equal_nan=True) else _DRAWS
            drawn += [of_part(first)[0] for _ in range(len(drawn), draws)]
            doubled = [of_whole(losses.joined(first, first))[0] for _ in range(draws)]
            one, twice = (np.mean(np.abs(each[:draws]), axis=0) for each in (drawn, doubled))
            each_ratio = twice / np.where((one > 0) & np.isfinite(one), one, np.nan)
            ratios = dict(zip(of_part.names, each_ratio.tolist(), strict=True))
    except Exception:  # of a step that made-up examples don't suit
        pass
    for variable, is_without_order, is_of_any_batch in assigned:
        # A random mask is one of places, and not of examples.
        if not is_without_order and not of_part.is_random:
            raise ValueError(
                f"{step.name}: it assigns to {getattr(variable, 'path', variable.name)!r} what it computes from single "
                "examples, of which a replica has its own, so the replicas' values have no mean; gather them first, "
                "with tf.distribute.get_replica_context().all_gather(value, axis=0), which works without a policy. "
                "Received: a new value that depends on the order of the examples"
            )
        if not is_of_any_batch and isinstance(variable, tf.Variable):
            _log.say(
                f"{step.name}: it assigns to the tf.Variable {variable.name!r} what it computes from a replica's own "
                "examples, which is not that of one device, and each replica may keep a value of its own; use a weight "
                "(self.add_weight(..., trainable=False)), of which the replicas' values are averaged, or a metric"
            )
    sums: dict[str, set[int]] = {"optimizer": set(), "metric": set(), "log": set()}
    for (kind, key), ratio in ratios.items():
        is_sum = ratio > _MOST_OF_A_MEAN if draws > 1 else abs(ratio - 2) < _FROM_A_SUM
        if is_sum and np.isfinite(ratio):
            sums[kind].add(key)
        if kind == "optimizer" and _MOST_OF_A_MEAN < ratio < np.inf:
            is_what = "a sum over the examples, so those of the replicas are added up"
            neither = "neither a mean nor a sum; divide it by the number of examples, as tf.reduce_mean does"
            _log.say(
                f"{step.name}: its gradient is {is_what if is_sum else neither}. Received: a gradient {ratio:.3g} "
                "times as large for a batch that is given twice"
            )
    return losses.Sums(*map(frozenset, sums.values()))


class _SeenError(ValueError):
    """The step does what would be seen."""


def _of_sizes(strategy: Any, step: Step, batch: Any, like: Sequence[np.ndarray]) -> tuple[_Trial, _Trial]:
    """Returns trials for batches of this size and for twice as many examples: one trace, if any size suits the step."""
    try:
        of_any = _Trial(strategy, step, batch, like, None)
    except _SeenError:
        raise
    except Exception:  # of a step that needs a known size
        small, large = (_Trial(strategy, step, batch, like, count * losses.EXAMPLES) for count in (1, 2))
        return small, large
    return of_any, of_any


class _Trial:
    """A step of one replica, traced for flat batches.

    Args:
      strategy: the strategy.
      step: a step.
      batch: the structure of its batches.
      like: a flat batch.
      size: number of examples; None for any.

    Attributes:
      names: of each value of a call, its kind and its key in `losses.Sums`.
      assigned: the weights, and each `tf.Variable` of the user's own, that the step may assign.
      is_random: True if it draws random numbers.

    Raises:
      _SeenError: the step does what would be seen.
      ValueError: it gathers what other replicas have.
    """

    def __init__(self, strategy: Any, step: Step, batch: Any, like: Sequence[np.ndarray], size: int | None) -> None:
        self._strategy, self._structure = strategy, batch
        self.names: list[tuple[str, int]] = []
        self.assigned: list[Any] = []
        self._logs: list[Any] = []
        self._step = copy.copy(step)

        @functools.wraps(step.function)
        def keeping(batch: Any) -> Any:
            result = step.function(batch)
            self._logs = tf.nest.flatten(result)
            return result

        self._step.function = keeping
        self._split = SplitTrainStep(self._step, 1)
        specs = [tf.TensorSpec([size, *each.shape[1:]], each.dtype) for each in like]
        self._computed: Any = self._split.settled(lambda: one_replica.trace(strategy, self._results, specs))
        types = graphs.types_in(self._computed.graph)
        self.is_random = any(map(_RANDOM.match, types))
        if any(map(losses.EFFECTS.match, types)):
            raise _SeenError(step.name)
        # Of the user's own, or written past Keras.
        self._written = graphs.written_in(self._computed.graph)
        self.assigned += self._written

    def __call__(self, flat: Sequence[np.ndarray]) -> tuple[np.ndarray, list[np.ndarray]]:
        """Returns the values of `names`, and the new ones of `assigned`; undoes writes."""
        with losses.restored(self._written):
            found = [each.numpy() for each in self._computed(*map(tf.constant, flat))]
            states = found[len(self.names) :] + [each.numpy() for each in self._written]
        return np.array(found[: len(self.names)], np.float64), states

    def _results(self, *given: tf.Tensor) -> list[tf.Tensor]:
        strategy, model, split = self._strategy, self._step.model, self._split
        rows = tf.shape(given[0], tf.int64)[0]
        share = tf.cast(rows, tf.float64) / (2 * losses.EXAMPLES)
        with one_replica.replica_on(strategy, strategy.extended.worker_devices[0]), losses.counted_as_one(strategy):
            changes = one_replica.without_others(self._step.name, 2, lambda line: None)
            # What is known to be a sum becomes an estimate of the sum over the whole batch.
            changes += losses.patches(model, lambda: share, gather=tf.identity)
            with patched_attributes(changes):
                contribution = split.contribute(tf.nest.pack_sequence_as(self._structure, given), rows)
        by_optimizer: dict[int, list[Any]] = {id(each): [] for each in optimizers_of(model)}
        for gradient, (optimizer, _) in zip(contribution.gradients, split.targets(), strict=True):
            by_optimizer[id(optimizer)].append(tf.cast(tf.convert_to_tensor(gradient), tf.float32))
        # Of a batch of unknown size they are multiplied by the number of its examples.
        values = {
            ("optimizer", key): tf.linalg.global_norm(each) / contribution.weight
            for key, each in by_optimizer.items()
            if each
        }
        counted = {id(each): count for each, count in zip(split.counters, contribution.counts, strict=True)}
        for metric in models.means_in(model.metrics):
            total, count = (counted.get(id(getattr(metric, name, None))) for name in ("total", "count"))
            if total is not None and count is not None and total.shape.rank == 0:
                values["metric", id(metric)] = tf.math.divide_no_nan(total, count)
        for metric in model.metrics:
            if type(metric) is keras.metrics.Sum and id(metric.total) in counted:
                # A sum counts a number by the replica's share of the batch.
                total = counted[id(metric.total)]
                values["metric", id(metric)] = total / tf.cast(share, total.dtype)
        for index, leaf in enumerate(self._logs):
            if tf.is_symbolic_tensor(leaf) and leaf.shape.rank == 0 and leaf.dtype.is_floating:
                values["log", index] = leaf
        self.names = list(values)
        assigned = [
            (variable, value / tf.cast(contribution.weight, value.dtype))
            for variable, value in zip(split.states(), contribution.states, strict=True)
            if value.dtype.is_floating
        ]
        self.assigned = [variable for variable, _ in assigned]
        return [*(tf.cast(each, tf.float32) for each in values.values()), *(value for _, value in assigned)]
