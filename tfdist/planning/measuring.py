# SPDX-License-Identifier: Apache-2.0
"""Measures a model that a script is about to train: its steps at several batch sizes, its gradients, its bytes."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist import _machine
from tfdist.compat.keras import fit
from tfdist.planning.profile import MeasuredSteps, NoiseScale, Profile, Table

# A sparse gradient is added up in a dense tensor only below this size.
_MOST_DENSE_BYTES = 2**28


def gradients_of(model: Any, batch: Any) -> list[Any]:
    """Returns the gradients of a batch with respect to the trainable variables; None where there is none."""
    x, y, weights = keras.utils.unpack_x_y_sample_weight(batch)
    with tf.GradientTape() as tape:
        predicted = model(x, training=True)
        loss = model.compute_loss(x=x, y=y, y_pred=predicted, sample_weight=weights)
    variables = [variable.value for variable in model.trainable_variables]
    return tape.gradient(loss, variables)


def sparse_tables(model: Any, batch: Any) -> tuple[Table, ...]:
    """Finds tables: variables whose gradient has rows (`tf.IndexedSlices`)."""
    tables = []
    for variable, gradient in zip(model.trainable_variables, gradients_of(model, batch), strict=True):
        if isinstance(gradient, tf.IndexedSlices):
            rows = int(tf.size(tf.unique(tf.reshape(gradient.indices, [-1]))[0]))
            row_bytes = bytes_of(variable) // max(1, variable.shape[0])
            tables.append(Table(variable.path, int(variable.shape[0]), row_bytes, float(rows)))
    return tuple(tables)


def _squared_norm(gradients: Sequence[Any]) -> float:
    return float(tf.add_n([tf.reduce_sum(tf.square(gradient)) for gradient in gradients]))


def bytes_of(variable: Any) -> int:
    """Bytes of a variable of Keras."""
    return int(tf.as_dtype(variable.dtype).size * tf.TensorShape(variable.shape).num_elements())


# Gradient noise scale from squared norms of gradients at two batch sizes.
#
# With G the true gradient and S the trace of the covariance of an example's gradient, E|G_B|^2 = |G|^2 + S / B. So,
# from the squared norms at a small size b and a big one B (McCandlish et al. 2018, arXiv 1812.06162, appendix A.1),
#
#     |G|^2 = (B |G_B|^2 - b |G_b|^2) / (B - b)
#     S     = (|G_b|^2 - |G_B|^2) / (1 / b - 1 / B)
#     B_simple = S / |G|^2
#
# Both are unbiased, their ratio is not; so it is taken of the means over many batches, and its interval is found by
# leaving out each batch in turn (jackknife).


# Of a normal distribution, for an interval of 90 %.
_QUANTILE = 1.645


def estimate_noise_scale(norms: Sequence[tuple[float, float]], small: float, big: float) -> NoiseScale | None:
    """Estimates the noise scale.

    Args:
      norms: of each batch, the mean of |G_b|^2 over its parts, and |G_B|^2.
      small: b, examples of a part.
      big: B, examples of a batch.

    Returns:
      None with fewer than two batches, or if they say nothing: noise or gradient may be none.
    """
    if len(norms) < 2 or small >= big:
        return None
    sums = [sum(each) for each in zip(*norms, strict=True)]
    value = _ratio(sums[0], sums[1], small, big)
    # Of the logarithm, whose distribution is closer to a normal one.
    left_out = [_ratio(sums[0] - mine, sums[1] - theirs, small, big) for mine, theirs in norms]
    if not all(0 < each < math.inf for each in left_out) or value <= 0:
        return None
    deviation = math.sqrt((len(norms) - 1) * statistics.pvariance(map(math.log, left_out)))
    factor = math.exp(min(_QUANTILE * deviation, 700.0))
    return NoiseScale(value, value / factor, value * factor)


def _ratio(small_norm: float, big_norm: float, small: float, big: float) -> float:
    squared = (big * big_norm - small * small_norm) / (big - small)
    trace = (small_norm - big_norm) / (1 / small - 1 / big)
    return trace / squared if squared > 0 else math.inf


# Multiples of the script's batch size.
_FACTORS = (1.0, 0.5, 2.0, 0.25, 4.0)
# Shares of the time: steps of fit, steps at all sizes, gradients.
_FIT, _STEPS, _NORMS = 0.35, 0.4, 0.2
# Steps that trace, or find caches cold, and don't count.
_WARM_UP = 3
_LEAST_SAMPLES, _MOST_SAMPLES = 3, 2000
_MOST_BATCHES = 32
_MOST_BYTES = 2**28
_PARTS = 4


class Measuring(keras.callbacks.Callback):
    """Stops a `fit` after some seconds, and keeps the durations of its steps.

    Attributes:
      secs: durations of the steps.
      cpu_secs: CPU time of all of them.
      other_cores: mean number of cores that other programs used meanwhile; 0 if unknown.
    """

    def __init__(self, secs: float) -> None:
        super().__init__()
        self.secs: list[float] = []
        self.cpu_secs = self.other_cores = 0.0
        self._limit = secs
        self._last = self._last_cpu = self._began = self._others_began = 0.0
        self._seen = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Notes a step."""
        now, cpu = time.perf_counter(), time.process_time()
        self._seen += 1
        if self._seen == _WARM_UP:
            self._began, self._others_began = now, self._busy_secs_of_others(cpu)
        elif self._seen > _WARM_UP and self._last:
            # steps_per_execution > 1 calls once for several steps.
            executed = max(1, int(getattr(self.model, "steps_per_execution", 1) or 1))
            self.secs += [(now - self._last) / executed] * executed
            self.cpu_secs += cpu - self._last_cpu
            is_over = now >= self._began + self._limit or len(self.secs) >= _MOST_SAMPLES
            if is_over and len(self.secs) >= _LEAST_SAMPLES:
                self.model.stop_training = True
                others = (self._busy_secs_of_others(cpu) - self._others_began) / (now - self._began)
                self.other_cores = min(_machine.usable_cpus(), max(0.0, others))
        self._last, self._last_cpu = now, cpu

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Starts no step: the time between two epochs is none of a step's."""
        self._last = 0.0

    @staticmethod
    def _busy_secs_of_others(cpu: float) -> float:
        busy = _machine.busy_secs()
        return math.nan if busy is None else busy - cpu  # Of NaN, `max(0.0, ...)` makes 0.

    def run(self, fit: Callable[..., Any], arguments: dict[str, Any]) -> None:
        """Runs `fit` until enough is measured."""
        fit(**{**arguments, "epochs": 10**6, "verbose": 0, "callbacks": [self]})


def measure(
    model: Any, fit: Callable[..., Any], arguments: dict[str, Any], secs: float, say: Callable[[str], object]
) -> Profile:
    """Runs `fit` for a while, then single steps and gradients on real batches; the weights move meanwhile.

    Args:
      model: the model.
      fit: its `fit`, with keyword arguments.
      arguments: what the script calls `fit` with.
      secs: how long to measure; building and tracing are not counted.
      say: is called with a line about what is measured.
    """
    measuring = Measuring(secs * _FIT)
    left_out = ("callbacks", "validation_data", "validation_split", "validation_freq", "initial_epoch")
    given = {name: value for name, value in arguments.items() if name not in left_out}
    say("steps of fit")
    measuring.run(fit, given)
    found = _batches(arguments)
    size = _size(found[0])
    say(f"steps at several batch sizes, from {size} examples")
    steps = _steps(fit, found, size, secs * _STEPS)
    say("gradients")
    tables, noise = (), None
    # Whatever a model's own train_step does without `call` and `compute_loss`.
    try:
        tables = sparse_tables(model, found[0])
        noise = _noise(model, found, size, secs * _NORMS)
    except Exception as error:
        text = " ".join(str(error).replace("\x1b[1m", "").replace("\x1b[0m", "").split())[:200]  # Keras writes in bold.
        say(f"{'' if tables else 'sparse tables and '}the noise scale fails: {type(error).__name__}: {text}")
    sparse_names = {table.name for table in tables}
    trainable = list(model.trainable_variables)
    return Profile(
        batch_size=size,
        steps=tuple(steps),
        fit_secs=tuple(measuring.secs),
        dense_bytes=sum(bytes_of(each) for each in trainable if each.path not in sparse_names),
        trainable_bytes=sum(map(bytes_of, trainable)),
        optimizer_bytes=sum(map(bytes_of, getattr(model.optimizer, "variables", []))),
        tables=tables,
        noise_scale=noise,
        model=str(model.name),
        device="GPU" if tf.config.list_logical_devices("GPU") else "CPU",
        cores=_machine.usable_cpus(),
        cpu_secs=measuring.cpu_secs / len(measuring.secs),
        other_cores=measuring.other_cores,
    )


def _batches(arguments: dict[str, Any]) -> list[Any]:
    """Returns some of the batches that `fit` reads; the last one, which may be short, only if it is the first."""
    found: list[Any] = []
    total = 0
    for batch in fit.batches_of_fit(arguments):
        if found and _size(batch) != _size(found[0]):
            break
        found.append(batch)
        tensors = [each for each in tf.nest.flatten(batch) if isinstance(each, tf.Tensor)]
        total += sum(int(tf.size(each)) * each.dtype.size for each in tensors)
        if total > _MOST_BYTES or len(found) == _MOST_BATCHES:
            break
    if not found:
        raise ValueError("fit has no batch to measure with; give it data")
    return found


def _size(batch: Any) -> int:
    first = next(each for each in tf.nest.flatten(batch) if each is not None)
    return int(first.shape[0] if first.shape[0] is not None else tf.shape(first)[0])


def _steps(fit: Callable[..., Any], found: Sequence[Any], size: int, secs: float) -> list[MeasuredSteps]:
    can_slice = all(isinstance(each, tf.Tensor) and each.shape.rank for each in tf.nest.flatten(found[0]))
    sizes = dict.fromkeys(max(1, round(size * factor)) for factor in _FACTORS) if can_slice else {size: None}
    measured = []
    for wanted in sizes:
        batch = found[0] if wanted == size else _with_size(found, wanted)
        measuring = Measuring(secs / len(sizes))
        # One batch for ever: making it costs nothing.
        data = tf.data.Dataset.from_tensors(batch).repeat()
        try:
            measuring.run(fit, {"x": data, "steps_per_epoch": _MOST_SAMPLES, "shuffle": False})
        except (tf.errors.ResourceExhaustedError, tf.errors.InvalidArgumentError, ValueError):
            # A batch too large for the device, or a model with a fixed batch size: the others say enough.
            if wanted == size:
                raise
        else:
            measured.append(MeasuredSteps(wanted, tuple(measuring.secs)))
    return sorted(measured, key=lambda each: each.batch_size)


def _with_size(found: Sequence[Any], wanted: int) -> Any:
    """Returns `wanted` examples, cut from a batch or put together from several."""
    count = -(-wanted // _size(found[0]))
    # The same batch again costs as much as another one.
    chosen = [found[index % len(found)] for index in range(count)]
    return tf.nest.map_structure(lambda *parts: tf.concat(parts, 0)[:wanted], *chosen)


def _noise(model: Any, found: Sequence[Any], size: int, secs: float) -> NoiseScale | None:
    parts = min(_PARTS, size)
    # Too large for dense copies of its gradients, or too few examples.
    if sum(map(bytes_of, model.trainable_variables)) > _MOST_DENSE_BYTES or parts < 2 or len(found) < 2:
        return None
    part, end, norms = size // parts, float("inf"), list[tuple[float, float]]()

    @tf.function(reduce_retracing=True)
    def of_part(part: Any) -> list[Any]:
        found = gradients_of(model, part)
        return [tf.cast(tf.convert_to_tensor(each), tf.float32) for each in found if each is not None]

    for batch in found:
        total, small = list[Any](), 0.0
        for first in range(0, parts * part, part):
            cut = tf.nest.map_structure(lambda each, first=first: each[first : first + part], batch)
            gradients = of_part(cut)
            small += _squared_norm(gradients) / parts
            total = [each + more for each, more in zip(total, gradients, strict=True)] if total else gradients
        norms.append((small, _squared_norm(total) / parts**2))
        if time.perf_counter() > end:
            break
        # Tracing the first one is not counted.
        end = time.perf_counter() + secs if len(norms) == 1 else end
    return estimate_noise_scale(norms, part, part * parts)
