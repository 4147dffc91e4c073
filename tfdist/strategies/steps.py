# SPDX-License-Identifier: Apache-2.0
"""What the synchronous strategies add to a Keras step that is handed to `strategy.run`.

A step is a bound `train_step` or `test_step` of a Keras model; any other function passes through untouched. Around it:

- nothing of it is made unless its data come;
- optimizers are built before anything is traced, so that slots are not created inside a loop;
- each replica's gradients count by its share of the global batch, so that an uneven batch gives the mean over its
  examples; a replica without examples contributes nothing;
- the optimizer tap puts clipping, accumulation and loss scaling after the sum over replicas;
- the logs become those of the whole global batch, in one reduction, whatever their number;
- statistics kept by layers, such as BatchNormalization's, are averaged, so that every replica keeps the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer

from tfdist.engines import sharing, tap, whole_step
from tfdist.engines.averaging import AveragingEngine

TRAIN, TEST = "train_step", "test_step"
# Set on tensors that are the same on all replicas already.
REDUCED = "_tfdist_reduced"

Sum = Callable[[Sequence[tf.Tensor]], list[tf.Tensor]]


def model_of(function: Any) -> keras.Model | None:
    """The model whose step this is, or None if it is no Keras step."""
    model = getattr(function, "__self__", None)
    is_step = isinstance(model, keras.Model) and getattr(function, "__name__", "") in (TRAIN, TEST)
    return model if is_step else None


def run_step(strategy: Any, run: Callable[[], Any], step: Any, data: Any, sum_over_workers: Sum) -> Any:
    """Runs a Keras step on all replicas.

    Args:
      strategy: the strategy.
      run: runs the step as the stock strategy does and returns its logs per replica.
      step: a bound `train_step` or `test_step`.
      data: the step's argument: distributed values, or what every replica gets.
      sum_over_workers: sums tensors over all workers.

    Returns:
      The logs, equal on all replicas and workers.
    """
    model, training = step.__self__, step.__name__ == TRAIN
    _check_xla(strategy, model)
    if training:
        _build_optimizers(strategy, model)
    parts = _local(strategy, data)
    with whole_step.or_none(parts):
        shares = Shares.of(strategy, data, [*parts.values()], sum_over_workers)
        weigh = _weigh(model, shares) if training else None
        taps = tap.tapped(tap.optimizers_of(model), weigh) if training else contextlib.nullcontext()
        with taps, tap.attributes(_loss_trackers(model, shares)):
            logs = run()
        return _Results(strategy, model, shares, sum_over_workers).merge(step, logs, training)


def run_alone(strategy: Any, averaging: AveragingEngine, step: Any, data: Any) -> Any:
    """Runs a Keras train step on each replica alone; see `run_step`, and for `data` `averaging_data.is_alone`."""
    _check_xla(strategy, step.__self__)
    _build_optimizers(strategy, step.__self__)
    with whole_step.or_none(_local(strategy, data)):
        return tf.nest.map_structure(_mark, averaging.step(step, data))


@dataclasses.dataclass(frozen=True)
class Shares:
    """How the examples of one global batch are spread.

    Attributes:
      rows: examples on each replica of this worker, int64.
      total: examples on all replicas of all workers, int64.
      num_replicas: replicas on all workers.
    """

    rows: tuple[tf.Tensor, ...]
    total: tf.Tensor
    num_replicas: int

    @classmethod
    def of(cls, strategy: Any, data: Any, batches: list[Any], sum_over_workers: Sum) -> Shares | None:
        """The shares of `data`, of which this worker has `batches`; None if they are known to be equal."""
        if strategy.num_replicas_in_sync == 1 or _are_surely_even(strategy, data, batches):
            return None
        rows = [sharing.rows(batch) for batch in batches]
        if any(count is None for count in rows):
            return None
        (total,) = sum_over_workers([tf.add_n(rows)])
        return cls(tuple(rows), total, strategy.num_replicas_in_sync)

    def is_even(self, replica: int) -> tf.Tensor:
        """Whether this replica of this worker has exactly one part in `num_replicas` of the batch."""
        return tf.equal(self.rows[replica] * self.num_replicas, self.total)

    def of_replica(self, replica: int, dtype: tf.DType = tf.float32) -> tf.Tensor:
        """The part of the global batch, 0 to 1, that this replica of this worker has."""
        share = tf.cast(self.rows[replica], tf.float64) / tf.cast(tf.maximum(self.total, 1), tf.float64)
        return tf.cast(share, dtype)

    def of_this_replica(self) -> tf.Tensor:
        """The part of the global batch that this replica has; called in replica context."""
        return self.of_replica(tf.distribute.get_replica_context()._replica_id)

    def weigh(self, gradients: Sequence[Any]) -> list[Any]:
        """Gradients of a mean over this replica's examples, as their part in the mean over the global batch.

        Keras has divided them by the number of replicas already. Called in replica context.
        """
        replica = tf.distribute.get_replica_context()._replica_id
        present = [gradient for gradient in gradients if gradient is not None]
        share = self.of_replica(replica) * self.num_replicas
        # The usual even batch passes through without touching, or copying, a gradient.
        weighed = tf.cond(self.is_even(replica), lambda: _same(present), lambda: [_times(g, share) for g in present])
        rest = iter([weighed] if len(present) == 1 and not isinstance(weighed, list | tuple) else weighed)
        return [None if gradient is None else next(rest) for gradient in gradients]


def _weigh(model: keras.Model, shares: Shares | None) -> Callable[[Sequence[Any]], list[Any]] | None:
    if shares is None:
        return None
    sums = _sum_losses(model)
    if not sums:
        return shares.weigh
    return None if len(sums) == len(_losses(model)) else _only_even(shares)


def _loss_trackers(model: keras.Model, shares: Shares | None) -> list[tuple[Any, str, Any]]:
    """What lets the metrics of the losses count as on one device where replicas have different numbers of examples.

    Keras weighs each replica's loss by its examples, which is wrong for sums, and not at all for the losses of single
    outputs.
    """
    if shares is None or not _losses(model):
        return []
    is_sum = [loss in _sum_losses(model) for loss in _losses(model)]
    trackers = [(model._loss_tracker, lambda: shares.total / shares.num_replicas)] if all(is_sum) else []
    # One for each loss, or none for a single one.
    for metric, summed in zip(model._compile_loss.metrics, is_sum, strict=False):
        trackers.append((metric, (lambda: 1 / shares.num_replicas) if summed else shares.of_this_replica))
    return [(metric, "update_state", _weighing(metric.update_state, weight)) for metric, weight in trackers]


def _weighing(update_state: Callable[..., Any], weight: Callable[[], Any]) -> Callable[..., Any]:
    def update(values: Any, sample_weight: Any = None) -> Any:
        del sample_weight
        return update_state(values, sample_weight=tf.cast(weight(), tf.float32))

    return update


def _only_even(shares: Shares) -> Callable[[Sequence[Any]], list[Any]]:
    """For a model of which one loss is a sum and another a mean: one weight can't be right for both."""

    def check(gradients: Sequence[Any]) -> list[Any]:
        replica = tf.distribute.get_replica_context()._replica_id
        message = (
            "compile(loss=...): losses with reduction='sum' beside losses with a mean can't be weighed for a batch "
            "that divides unevenly among the replicas; use one kind of reduction, or batch(..., drop_remainder=True). "
            "Received examples, replicas:"
        )
        tf.debugging.Assert(shares.is_even(replica), [message, shares.total, shares.num_replicas])
        return list(gradients)

    return check


def _losses(model: keras.Model) -> list[Any]:
    compiled = getattr(model, "_compile_loss", None)
    return [loss.loss for loss in getattr(compiled, "_flat_losses", None) or [] if loss.loss is not None]


def _sum_losses(model: keras.Model) -> list[Any]:
    return [loss for loss in _losses(model) if getattr(loss, "reduction", "mean") in ("sum", "none", None)]


def _same(tensors: Sequence[Any]) -> list[Any]:
    return [tf.identity(tensor) if isinstance(tensor, tf.Tensor) else tensor for tensor in tensors]


def _times(gradient: Any, share: tf.Tensor) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(_times(gradient.values, share), gradient.indices, gradient.dense_shape)
    # Without examples the gradient may be NaN; no share of it is nothing.
    return tf.math.multiply_no_nan(gradient, tf.cast(share, gradient.dtype))


def _check_xla(strategy: Any, model: keras.Model) -> None:
    devices = strategy.extended.worker_devices
    is_local_gpus = len(devices) == strategy.num_replicas_in_sync and all("GPU" in device for device in devices)
    if model.jit_compile and strategy.num_replicas_in_sync > 1 and not is_local_gpus:
        raise ValueError(
            "compile(jit_compile=True): XLA can't compile a step that runs on several workers or CPU devices; leave it "
            f"at 'auto' or False. Received: jit_compile=True, {strategy.num_replicas_in_sync} replicas, {devices[0]}"
        )


def _build_optimizers(strategy: Any, model: keras.Model) -> None:
    # A model of its own train_step may use its own optimizers on parts of itself: only Keras' one is known to take all.
    optimizer = model.optimizer
    if optimizer is None or optimizer.built or not model.trainable_variables:
        return
    with tf.init_scope(), strategy.scope():
        optimizer.build(model.trainable_variables)


def _are_surely_even(strategy: Any, data: Any, batches: list[Any]) -> bool:
    """Whether the shapes say that all replicas have equally many examples."""
    is_alone = strategy.num_replicas_in_sync == len(batches)
    if not _is_distributed(data) or (tf.executing_eagerly() and not is_alone):
        # What this worker sees says nothing about the others: outside a graph every size is known.
        return False
    sizes = {sharing.static_size(batch) for batch in batches}
    return len(sizes) == 1 and None not in sizes


def _is_distributed(data: Any) -> bool:
    return all(isinstance(leaf, tf.distribute.DistributedValues) for leaf in tf.nest.flatten(data))


def _local(strategy: Any, data: Any) -> dict[str, Any]:
    """What each device of this process is given of a step's argument, by the device's name."""

    def of_replica(replica: int) -> Any:
        def pick(leaf: Any) -> Any:
            is_distributed = isinstance(leaf, tf.distribute.DistributedValues)
            return strategy.experimental_local_results(leaf)[replica] if is_distributed else leaf

        return tf.nest.map_structure(pick, data)

    return {device: of_replica(replica) for replica, device in enumerate(strategy.extended.worker_devices)}


@dataclasses.dataclass(frozen=True)
class _Results:
    """What a step leaves on the replicas, brought together."""

    strategy: Any
    model: keras.Model
    shares: Shares | None
    sum_over_workers: Sum

    def merge(self, step: Any, logs: Any, training: bool) -> Any:
        """Averages the layers' statistics and returns the logs of the global batch, with one reduction for both."""
        statistics = _statistics(self.model) if training else []
        counters = _counters(self.model) if _is_stock(step) else None
        if counters is None:
            parts = [self._mean_part(leaf) for leaf in tf.nest.flatten(logs)]
        else:
            parts = [tf.add_n([tf.convert_to_tensor(c) for c in counter.value.values]) for counter in counters]
        parts += [self._mean_part(variable.value) for variable in statistics]
        sums = self.sum_over_workers(parts)
        for variable, mean in zip(statistics, sums[len(sums) - len(statistics) :], strict=True):
            _assign_everywhere(variable, mean)
        sums = sums[: len(sums) - len(statistics)]
        merged = self._from_means(logs, sums) if counters is None else _from_counters(self.model, counters, sums)
        return tf.nest.map_structure(_mark, merged)

    def _mean_part(self, value: Any) -> tf.Tensor:
        """What this worker adds to the mean over all replicas, weighted by their examples."""
        # What is no distributed value, such as a number that Python computed, is the same on all replicas.
        values = getattr(value, "values", None) or [value] * len(self.strategy.extended.worker_devices)
        return tf.add_n([self._weighted(index, value) for index, value in enumerate(values)])

    def _weighted(self, replica: int, value: Any) -> tf.Tensor:
        value = tf.convert_to_tensor(value)
        value = value if value.dtype.is_floating else tf.cast(value, tf.float32)
        if self.shares is None:
            return value / self.strategy.num_replicas_in_sync
        return tf.math.multiply_no_nan(value, self.shares.of_replica(replica, value.dtype))

    def _from_means(self, logs: Any, means: list[tf.Tensor]) -> Any:
        first = [self.strategy.experimental_local_results(leaf)[0] for leaf in tf.nest.flatten(logs)]
        cast = [tf.cast(mean, tf.convert_to_tensor(leaf).dtype) for leaf, mean in zip(first, means, strict=True)]
        return tf.nest.pack_sequence_as(logs, cast)


def _is_stock(step: Any) -> bool:
    return step.__func__ is getattr(TensorFlowTrainer, step.__name__)


def _counters(model: keras.Model) -> list[Any] | None:
    """The variables in which the model's metrics count, or None if sums over the replicas are not what they mean."""
    variables = [variable for metric in model.metrics for variable in metric.variables]
    summable = all(hasattr(v.value, "values") and v.aggregation == "sum" for v in variables)
    return variables if variables and summable else None


def _from_counters(model: keras.Model, counters: list[Any], sums: list[tf.Tensor]) -> dict[str, Any]:
    with keras.StatelessScope(state_mapping=list(zip(counters, sums, strict=True))):
        return model.get_metrics_result()


def _statistics(model: keras.Model) -> list[Any]:
    """Float variables that layers update themselves, each replica from its own examples."""
    variables = [v for layer in model._flatten_layers() for v in layer._non_trainable_variables]
    unique = {id(v): v for v in variables if tf.as_dtype(v.dtype).is_floating and hasattr(v.value, "values")}
    return list(unique.values())


def _assign_everywhere(variable: Any, value: tf.Tensor) -> None:
    for copy in variable.value.values:
        with tf.device(copy.device):
            copy.assign(tf.cast(value, copy.dtype))


def _mark(value: Any) -> Any:
    if isinstance(value, tf.Tensor):
        setattr(value, REDUCED, True)
    return value
