# SPDX-License-Identifier: Apache-2.0
"""Measures a model that a script is about to train: its steps at several batch sizes, its gradients, its bytes."""

from __future__ import annotations

import dataclasses
import math
import operator
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist import _machine
from tfdist.compat.keras import fit
from tfdist.planning.profile import BUSY, MeasuredSteps, NoiseScale, Profile, Table

# Gradients of a model on parts of real batches: which are sparse, how many rows they have, and their squared norms.


# A sparse gradient is added up in a dense tensor only below this size.
_MOST_DENSE_BYTES = 2**28


@dataclasses.dataclass(frozen=True)
class Sparse:
    """Tables of a model with the rows that the gradient of one batch has."""

    tables: tuple[Table, ...]

    @property
    def names(self) -> set[str]:
        """Paths of the tables' variables."""
        return {table.name for table in self.tables}


def gradients_of(model: Any, batch: Any) -> list[Any]:
    """Returns the gradients of a batch with respect to the trainable variables; None where there is none."""
    x, y, weights = keras.utils.unpack_x_y_sample_weight(batch)
    with tf.GradientTape() as tape:
        predicted = model(x, training=True)
        loss = model.compute_loss(x=x, y=y, y_pred=predicted, sample_weight=weights)
    variables = [variable.value for variable in model.trainable_variables]
    return tape.gradient(loss, variables)


def sparse_gradients(model: Any, batch: Any) -> Sparse:
    """Finds tables: variables whose gradient has rows (`tf.IndexedSlices`)."""
    tables = []
    for variable, gradient in zip(model.trainable_variables, gradients_of(model, batch), strict=True):
        if isinstance(gradient, tf.IndexedSlices):
            rows = int(tf.size(tf.unique(tf.reshape(gradient.indices, [-1]))[0]))
            row_bytes = bytes_of(variable) // max(1, variable.shape[0])
            tables.append(Table(variable.path, int(variable.shape[0]), row_bytes, float(rows)))
    return Sparse(tuple(tables))


def squared_norms_of(model: Any) -> Callable[[Sequence[Any]], tuple[float, float]]:
    """Returns a function of the parts of a batch that returns the mean of their squared norms, and the batch's."""

    @tf.function(reduce_retracing=True)
    def of_part(part: Any) -> list[Any]:
        return [_dense(gradient) for gradient in gradients_of(model, part) if gradient is not None]

    def of_parts(parts: Sequence[Any]) -> tuple[float, float]:
        total: list[Any] = []
        small = 0.0
        for part in parts:
            gradients = of_part(part)
            small += _squared_norm(gradients) / len(parts)
            total = [each + other for each, other in zip(total, gradients, strict=True)] if total else gradients
        return small, _squared_norm(total) / len(parts) ** 2

    return of_parts


def _dense(gradient: Any) -> Any:
    return tf.cast(tf.convert_to_tensor(gradient), tf.float32)


def _squared_norm(gradients: Sequence[Any]) -> float:
    return float(tf.add_n([tf.reduce_sum(tf.square(gradient)) for gradient in gradients]))


def bytes_of(variable: Any) -> int:
    """Bytes of a variable of Keras."""
    return int(tf.as_dtype(variable.dtype).size * tf.TensorShape(variable.shape).num_elements())


def fit_in_memory(model: Any) -> bool:
    """True if dense copies of all gradients are small enough for the measurement of their norms."""
    return sum(map(bytes_of, model.trainable_variables)) <= _MOST_DENSE_BYTES


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
      None with fewer than two batches, or if no gradient is left after the noise.
    """
    if len(norms) < 2 or small >= big:
        return None
    sums = [sum(each) for each in zip(*norms, strict=True)]
    value = _ratio(sums[0], sums[1], small, big)
    if not math.isfinite(value):
        return None
    # Of the logarithm, whose distribution is closer to a normal one.
    left_out = [_ratio(sums[0] - mine, sums[1] - theirs, small, big) for mine, theirs in norms]
    if not all(0 < each < math.inf for each in left_out) or value <= 0:
        return NoiseScale(max(value, 0.0), 0.0, math.inf, len(norms))
    logs = [math.log(each) for each in left_out]
    middle, count = sum(logs) / len(logs), len(logs)
    deviation = math.sqrt((count - 1) / count * sum((each - middle) ** 2 for each in logs))
    factor = math.exp(min(_QUANTILE * deviation, 700.0))
    return NoiseScale(value, value / factor, value * factor, len(norms))


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
_LEAST_SAMPLES, _LEAST_BUSY_SAMPLES, _MOST_SAMPLES = 3, 10, 2000
# Linux counts CPU time in hundredths of a second.
_BLOCK_SECS, _SAMPLE_SECS = 0.25, 0.05
_MOST_BATCHES = 32
_MOST_BYTES = 2**28
_PARTS = 4


@dataclasses.dataclass
class Block:
    """Consecutive steps.

    Attributes:
      secs: their seconds.
      cpu_secs: their CPU time together.
      other_cores: cores that other programs used meanwhile.
      runnable: threads of this process that ran or waited for a core meanwhile.
    """

    secs: list[float] = dataclasses.field(default_factory=list)
    cpu_secs: float = 0.0
    other_cores: float = 0.0
    runnable: float = 0.0


class Measuring(keras.callbacks.Callback):
    """Stops a `fit` after some seconds, and keeps the durations of its steps.

    Where other programs are busy meanwhile, only the steps beside the least of them count.
    """

    def __init__(self, secs: float) -> None:
        super().__init__()
        self._secs = secs
        self._last = self._last_cpu = self._end = 0.0
        self._seen = self._kept = 0
        self._blocks = [Block()]
        self._began: tuple[float, float, float | None] = (0.0, 0.0, None)
        self._sampler = _Sampler()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Notes a step."""
        now, cpu = time.perf_counter(), time.process_time()
        self._seen += 1
        if self._seen == _WARM_UP:
            self._end = now + self._secs
            self._began = now, cpu, _machine.busy_secs()
            self._sampler.start()
        elif self._seen > _WARM_UP:
            block = self._blocks[-1]
            if self._last:
                # steps_per_execution > 1 calls once for several steps.
                block.secs += [(now - self._last) / self._executed] * self._executed
                block.cpu_secs += cpu - self._last_cpu
                self._kept += self._executed
            is_over = self._kept >= _LEAST_SAMPLES and (now >= self._end or self._kept >= _MOST_SAMPLES)
            if block.secs and (is_over or now - self._began[0] >= _BLOCK_SECS):
                self._close(block, now, cpu)
            if is_over:
                self.model.stop_training = True
        self._last, self._last_cpu = now, cpu

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Starts no step: the time between two epochs is none of a step's."""
        self._last = 0.0

    def run(self, fit: Callable[..., Any], arguments: dict[str, Any]) -> None:
        """Runs `fit` until enough is measured."""
        try:
            fit(**{**arguments, "epochs": 10**6, "verbose": 0, "callbacks": [self]})
        finally:
            # Not in on_train_end, which Keras doesn't call when `fit` raises.
            self._sampler.stop()

    def quiet(self) -> Block:
        """Returns the steps that count, as one block."""
        return quietest([block for block in self._blocks if block.secs], _machine.usable_cpus())

    def _close(self, block: Block, now: float, cpu: float) -> None:
        busy = _machine.busy_secs()
        began, cpu_began, busy_began = self._began
        if busy is not None and busy_began is not None:
            block.other_cores = max(0.0, (busy - busy_began - (cpu - cpu_began)) / (now - began))
        block.runnable = self._sampler.take()
        self._blocks.append(Block())
        self._began = now, cpu, busy

    @property
    def _executed(self) -> int:
        return max(1, int(getattr(self.model, "steps_per_execution", 1) or 1))


class _Sampler:
    """Counts the threads that run or wait for a core, now and then."""

    def __init__(self) -> None:
        self._counts: list[int] = []
        self._last = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tfdist profile", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()

    def take(self) -> float:
        """Returns the mean since the last call, or that of the call before it if there is none yet."""
        counts, self._counts = self._counts, []
        self._last = sum(counts) / len(counts) if counts else self._last
        return self._last

    def _run(self) -> None:
        while not self._ended.wait(_SAMPLE_SECS):
            self._counts.append(_machine.runnable_threads())


def quietest(blocks: Sequence[Block], cores: int) -> Block:
    """Returns the blocks in which other programs used least: all that are quiet, or else a quarter of the steps."""
    wanted = max(_LEAST_BUSY_SAMPLES, sum(len(block.secs) for block in blocks) // 4)
    taken: set[int] = set()
    count = 0
    for index in sorted(range(len(blocks)), key=lambda index: blocks[index].other_cores):
        if count >= wanted and blocks[index].other_cores > BUSY * cores:
            break
        taken.add(index)
        count += len(blocks[index].secs)
    chosen = [blocks[index] for index in sorted(taken)]
    shares = [sum(block.secs) for block in chosen]
    return Block(
        [each for block in chosen for each in block.secs],
        sum(block.cpu_secs for block in chosen),
        min(cores, sum(map(operator.mul, shares, (block.other_cores for block in chosen))) / sum(shares)),
        sum(map(operator.mul, shares, (block.runnable for block in chosen))) / sum(shares),
    )


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
    quiet = measuring.quiet()
    tables, reason = _tables(model, found[0])
    say("gradients")
    noise, noise_reason = (None, reason) if reason else _noise(model, found, size, secs * _NORMS)
    sparse_names = {table.name for table in tables}
    trainable = list(model.trainable_variables)
    return Profile(
        batch_size=size,
        steps=tuple(steps),
        fit_secs=tuple(quiet.secs),
        variables=len(trainable),
        dense_bytes=sum(bytes_of(each) for each in trainable if each.path not in sparse_names),
        trainable_bytes=sum(map(bytes_of, trainable)),
        optimizer_bytes=sum(map(bytes_of, getattr(model.optimizer, "variables", []))),
        tables=tables,
        flops_per_example=_flops(model, found[0], size),
        noise_scale=noise,
        noise_reason=noise_reason,
        model=str(model.name),
        device="GPU" if tf.config.list_logical_devices("GPU") else "CPU",
        cores=_machine.usable_cpus(),
        cpu_secs=quiet.cpu_secs / len(quiet.secs),
        other_cores=quiet.other_cores,
        runnable=quiet.runnable,
    )


def _batches(arguments: dict[str, Any]) -> list[Any]:
    """Returns some of the batches that `fit` reads; the last one, which may be short, only if it is the first."""
    found: list[Any] = []
    total = 0
    for batch in fit.batches_of_fit(arguments):
        if found and _size(batch) != _size(found[0]):
            break
        found.append(batch)
        total += sum(_bytes(each) for each in tf.nest.flatten(batch))
        if total > _MOST_BYTES or len(found) == _MOST_BATCHES:
            break
    if not found:
        raise ValueError("fit has no batch to measure with; give it data")
    return found


def _bytes(tensor: Any) -> int:
    return int(tf.size(tensor)) * tensor.dtype.size if isinstance(tensor, tf.Tensor) else 0


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
            measuring.run(fit, {"x": data, "steps_per_epoch": _MOST_SAMPLES})
        except (tf.errors.ResourceExhaustedError, tf.errors.InvalidArgumentError, ValueError):
            # A batch too large for the device, or a model with a fixed batch size: the others say enough.
            if wanted == size:
                raise
        else:
            measured.append(MeasuredSteps(wanted, tuple(measuring.quiet().secs)))
    return sorted(measured, key=lambda each: each.batch_size)


def _with_size(found: Sequence[Any], wanted: int) -> Any:
    """Returns `wanted` examples, cut from a batch or put together from several."""
    count = -(-wanted // _size(found[0]))
    # The same batch again costs as much as another one.
    chosen = [found[index % len(found)] for index in range(count)]
    return tf.nest.map_structure(lambda *parts: tf.concat(parts, 0)[:wanted], *chosen)


def _tables(model: Any, batch: Any) -> tuple[tuple[Table, ...], str]:
    """Returns the embedding tables, and "" or the reason why the gradients of this model can't be computed."""
    try:
        return sparse_gradients(model, batch).tables, ""
    except Exception as error:  # whatever a model's own train_step does without `call` and `compute_loss`
        return (
            (),
            f"gradients can't be computed outside of the model's train_step: {' '.join(str(error).split())[:200]}",
        )


def _noise(model: Any, found: Sequence[Any], size: int, secs: float) -> tuple[NoiseScale | None, str]:
    parts = min(_PARTS, size)
    if not fit_in_memory(model):
        return None, "the model is too large for dense copies of its gradients"
    if parts < 2 or len(found) < 2:
        return None, "needs at least two batches of at least two examples"
    part = size // parts
    norms = []
    squared_norms = squared_norms_of(model)
    end = float("inf")
    for batch in found:
        cut = [
            tf.nest.map_structure(lambda each, at=index * part: each[at : at + part], batch) for index in range(parts)
        ]
        norms.append(squared_norms(cut))
        if len(norms) == 1:
            end = time.perf_counter() + secs
        elif time.perf_counter() > end:
            break
    estimated = estimate_noise_scale(norms, part, part * parts)
    return estimated, "" if estimated else "no gradient is left above the noise of these batches"


def _flops(model: Any, batch: Any, size: int) -> float | None:
    """Counts floating-point operations by TensorFlow's profiler; the backward pass counts as two forward passes."""
    x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
    logger = tf.get_logger()
    level = logger.level
    logger.setLevel("ERROR")  # the profiler warns of its own parts
    try:
        graph = tf.function(lambda given: model(given, training=False)).get_concrete_function(x).graph
        builder = tf.compat.v1.profiler.ProfileOptionBuilder
        options = builder(builder.float_operation()).with_empty_output().build()
        counted = tf.compat.v1.profiler.profile(graph, options=options).total_float_ops
    except Exception:  # the profiler of TensorFlow 1 does not know all operations
        return None
    finally:
        logger.setLevel(level)
    return 3.0 * counted / size if counted else None
