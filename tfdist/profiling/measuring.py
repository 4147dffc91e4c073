# SPDX-License-Identifier: Apache-2.0
"""Measures a model that a script is about to train: its steps at several batch sizes, its gradients, its bytes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.advisor.profile import NoiseScale, Profile, StepTimes, Table
from tfdist.compat import profiled_fit
from tfdist.profiling import gradients, noise_scale
from tfdist.runtime import cpus

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
    """Stops a `fit` after some seconds, and keeps the durations of its steps."""

    def __init__(self, secs: float) -> None:
        super().__init__()
        self._secs = secs
        self._last = self._end = 0.0
        self._seen = 0
        self._last_cpu = 0.0
        self.secs: list[float] = []
        self._cpu_secs = 0.0

    @property
    def cpu_secs(self) -> float:
        """Mean CPU time of these steps, of all threads of this process."""
        return self._cpu_secs / max(1, len(self.secs))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Notes a step."""
        now, cpu = time.perf_counter(), time.process_time()
        self._seen += 1
        if self._seen == _WARM_UP:
            self._end = now + self._secs
        elif self._seen > _WARM_UP:
            if self._last:
                # steps_per_execution > 1 calls once for several steps.
                self.secs += [(now - self._last) / self._executed] * self._executed
                self._cpu_secs += cpu - self._last_cpu
            if len(self.secs) >= _LEAST_SAMPLES and (now >= self._end or len(self.secs) >= _MOST_SAMPLES):
                self.model.stop_training = True
        self._last, self._last_cpu = now, cpu

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Starts no step: the time between two epochs is none of a step's."""
        self._last = 0.0

    @property
    def _executed(self) -> int:
        return max(1, int(getattr(self.model, "steps_per_execution", 1) or 1))


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
    fit(**{**given, "epochs": 10**6, "verbose": 0, "callbacks": [measuring]})
    found = _batches(arguments)
    size = _size(found[0])
    say(f"steps at several batch sizes, from {size} examples")
    steps = _steps(fit, found, size, secs * _STEPS)
    tables, reason = _tables(model, found[0])
    say("gradients")
    noise, noise_reason = (None, reason) if reason else _noise(model, found, size, secs * _NORMS)
    sparse_names = {table.name for table in tables}
    trainable = list(model.trainable_variables)
    return Profile(
        batch_size=size,
        steps=tuple(steps),
        fit_secs=tuple(measuring.secs),
        variables=len(trainable),
        dense_bytes=sum(gradients.bytes_of(each) for each in trainable if each.path not in sparse_names),
        trainable_bytes=sum(map(gradients.bytes_of, trainable)),
        optimizer_bytes=sum(map(gradients.bytes_of, getattr(model.optimizer, "variables", []))),
        tables=tables,
        flops_per_example=_flops(model, found[0], size),
        noise_scale=noise,
        noise_reason=noise_reason,
        model=str(model.name),
        device="GPU" if tf.config.list_logical_devices("GPU") else "CPU",
        cores=cpus.usable(),
        cpu_secs=measuring.cpu_secs,
    )


def _batches(arguments: dict[str, Any]) -> list[Any]:
    """Returns some of the batches that `fit` reads; the last one, which may be short, only if it is the first."""
    found: list[Any] = []
    total = 0
    for batch in profiled_fit.batches(arguments):
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


def _steps(fit: Callable[..., Any], found: Sequence[Any], size: int, secs: float) -> list[StepTimes]:
    can_slice = all(isinstance(each, tf.Tensor) and each.shape.rank for each in tf.nest.flatten(found[0]))
    sizes = dict.fromkeys(max(1, round(size * factor)) for factor in _FACTORS) if can_slice else {size: None}
    measured = []
    for wanted in sizes:
        batch = found[0] if wanted == size else _with_size(found, wanted)
        measuring = Measuring(secs / len(sizes))
        # One batch for ever: making it costs nothing.
        data = tf.data.Dataset.from_tensors(batch).repeat()
        try:
            fit(x=data, steps_per_epoch=_MOST_SAMPLES, epochs=10**6, verbose=0, callbacks=[measuring])
        except (tf.errors.ResourceExhaustedError, tf.errors.InvalidArgumentError, ValueError):
            # A batch too large for the device, or a model with a fixed batch size: the others say enough.
            if wanted == size:
                raise
        else:
            measured.append(StepTimes(wanted, tuple(measuring.secs)))
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
        return gradients.sparse(model, batch).tables, ""
    except Exception as error:  # whatever a model's own train_step does without `call` and `compute_loss`
        return (
            (),
            f"gradients can't be computed outside of the model's train_step: {' '.join(str(error).split())[:200]}",
        )


def _noise(model: Any, found: Sequence[Any], size: int, secs: float) -> tuple[NoiseScale | None, str]:
    parts = min(_PARTS, size)
    if not gradients.fit_in_memory(model):
        return None, "the model is too large for dense copies of its gradients"
    if parts < 2 or len(found) < 2:
        return None, "needs at least two batches of at least two examples"
    part = size // parts
    norms = []
    squared_norms = gradients.squared_norms(model)
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
    estimated = noise_scale.estimate(norms, part, part * parts)
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
