# SPDX-License-Identifier: Apache-2.0
"""Sums of gradients under `Compression`, on one worker of a MultiWorkerMirroredStrategy.

Ownership: the strategy owns one `CompressedSums`. That owns the codec, which "auto" chooses by measurement, the trial
steps before that choice (`_Trial`), and the codec's state (`ErrorFeedback`).
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist import _log
from tfdist.compat.keras import functions as train_functions
from tfdist.compat.keras import models
from tfdist.compat.keras.optimizers import SumGradients, optimizers_of, trained_by
from tfdist.compression import choice
from tfdist.engines.agreement import Agreement
from tfdist.policies.compression import AUTO, Compression
from tfdist.step.gradients import DIFFERENCES, ErrorFeedback
from tfdist.transport.sums import Messages, Traffic, WorkerSums


class CompressedSums:
    """Sums gradients by the codec of a policy. A `policies.saved_state.WorkerState`.

    Args:
      compression: the policy.
      sums: of the workers, whose traffic is counted from now on.
      agreement: exchange of small values between the workers.

    Attributes:
      in_step: sums gradients in a step that all workers trace alike; None to sum them as they are.
      anywhere: likewise, at any other place.
      bytes_sent: returns the bytes that each worker has sent so far.
      of_differences: sums differences of parameters, in cross-replica context; None likewise.

    Raises:
      ValueError: the workers have different codecs.
    """

    def __init__(self, compression: Compression, sums: WorkerSums, agreement: Agreement) -> None:
        self._compression, self._sums, self._agreement = compression, sums, agreement
        given = agreement.gather(repr(compression), "comparing the codecs")
        if len({*given.values()}) > 1:
            shown = ", ".join(f"{task}: {policy}" for task, policy in given.items())
            raise ValueError(f"policies: all workers must have the same codec. Received: {shown}")
        senders = [str(task) for task in agreement.tasks]
        traffic = sums.traffic = Traffic(len(senders))
        self.bytes_sent = traffic.by_worker
        self._anywhere = Messages(sums, senders, agreement.tasks.index(agreement.task))
        self._feedback: ErrorFeedback | None = None
        self.in_step: SumGradients | None = None
        self.anywhere: SumGradients | None = None
        self.of_differences: SumGradients | None = None
        self._is_chosen = False
        # While steps are made before the choice.
        self._trial: _Trial | None = None
        if compression.codec != AUTO:
            self._use(compression.codec)

    def prepare(self, model: keras.Model) -> None:
        """Chooses the codec, before the first step of a built model is traced; all workers call it alike."""
        shapes = [] if self._is_chosen else _shapes_of(model)
        if shapes:
            with tf.init_scope():
                gradients = choice.made_up(shapes)
            self._choose(gradients)

    def prepare_in_fit(self, model: keras.Model) -> None:
        """Begins `fit` with trial steps, after which the codec is chosen; called in the trace of its step."""
        if self._is_chosen or not _shapes_of(model):
            return
        trial = self._trial if self._trial and self._trial.model is model else _Trial(model, self._sums.in_step)
        if train_functions.observe(model, lambda: self._is_chosen, self._after_call):
            self._trial, self.in_step = trial, trial.sum_all
        else:
            self.prepare(model)

    def _after_call(self, secs: float) -> None:
        if self._trial is None:
            return
        self._trial.after_call(secs)
        if self._trial.is_complete:
            self._choose(self._trial.gradients(), statistics.median(self._trial.secs))

    def _choose(self, gradients: choice.Gradients, step_secs: float | None = None) -> None:
        # As in a step, all workers trace the exchanges alike.
        transport = dataclasses.replace(self._anywhere, is_in_step=True)
        how = self._sums.in_step, transport, self._slowest, self._compression.error_bound, step_secs
        try:
            with tf.init_scope():
                found = choice.choose(gradients, *how)
        except Exception as error:
            # Errors other than TensorFlow's are sent to the other workers, which wait for this worker's measurements.
            raise RuntimeError(f'Compression("auto"): measuring the codecs failed: {error}') from error
        self._say(found.reason)
        if found.codec is None:
            # Steps are those without the policy then; to count would cost some hundredths of a small one.
            self._sums.traffic = None
        self._use(found.codec)

    def collect(self, model: keras.Model) -> tuple[Any, list[np.ndarray]]:
        """See `WorkerState.collect`."""
        if self._feedback is None:
            return None, []
        described, arrays = self._feedback.collect(model)
        is_worth_it = described is not None or self._compression.codec == AUTO
        return ({"codec": repr(self._feedback.codec), "state": described} if is_worth_it else None), arrays

    def distribute(self, model: keras.Model, described: Any, arrays: Sequence[np.ndarray]) -> None:
        """See `WorkerState.distribute`; "auto" continues with the codec of the checkpoint."""
        if described and not self._is_chosen:
            codec = next((each for each in choice.CANDIDATES if repr(each) == described["codec"]), None)
            if codec is not None:
                self._say(f"{codec!r}, as before")
                self._use(codec)
        if self._feedback is not None:
            self._feedback.distribute(model, described and described["state"], arrays)

    def _use(self, codec: Any) -> None:
        self._is_chosen, self._trial, self.in_step = True, None, None
        if codec is None:
            return
        self._feedback = ErrorFeedback(codec, self._anywhere)
        self.anywhere = functools.partial(self._feedback.sum_all, self._anywhere)
        self.of_differences = functools.partial(self._feedback.sum, transport=self._anywhere, kind=DIFFERENCES)
        self.in_step = functools.partial(self._feedback.sum_all, dataclasses.replace(self._anywhere, is_in_step=True))

    def _slowest(self, value: float) -> float:
        return max(self._agreement.gather(value, "comparing the speed of codecs").values())

    def _say(self, what: str) -> None:
        if self._agreement.is_chief:
            _log.say(f'Compression("auto"): {what}')


# Calls of the train function that are timed. All workers time as many, so that all choose after the same step.
_CALLS = 5


class _Trial:
    """The first steps under `Compression("auto")`: their gradients are summed as they are, and those of the last kept.

    Args:
      model: is trained.
      sum_dense: sums dense gradients as they are, in any context.

    Attributes:
      model: the same.
      sum_all: sums gradients as they are, and keeps the dense ones.
      secs: seconds of a step, by call.
    """

    def __init__(self, model: keras.Model, sum_dense: Callable[[Sequence[tf.Tensor]], Sequence[tf.Tensor]]) -> None:
        self.model, self._feedback = model, ErrorFeedback(_Kept())
        self.sum_all = functools.partial(self._feedback.sum_all, sum_dense)
        self._steps_before: int | None = None
        self.secs: list[float] = []

    @property
    def is_complete(self) -> bool:
        """True after enough steps."""
        return len(self.secs) >= _CALLS

    def gradients(self) -> list[tf.Tensor]:
        """Returns this worker's gradients of the last step, float32; a value that is not finite is a zero."""
        return [tf.constant(each) for values in self._values() for each in values[1:]]

    def after_call(self, secs: float) -> None:
        """Takes the time of a call of the train function, which may have made several steps."""
        # Of the first optimizer.
        steps, before = int(self._values()[0][0]), self._steps_before
        self._steps_before = steps
        # The first observed call follows the one that traced the step, whose steps were counted too.
        if before is not None and steps > before:
            self.secs.append(secs / (steps - before))

    def _values(self) -> list[list[np.ndarray]]:
        return [self._feedback.memory.collect([state])[0] for state in self._feedback.states_of(self.model)]


class _Kept:
    """In the place of a codec: its state is the gradients of the last step, and the number of steps."""

    def init(self, specs: Sequence[tf.TensorSpec]) -> list[tf.Tensor]:
        return [tf.zeros([], tf.int64), *(tf.zeros(spec.shape) for spec in specs)]

    def exchange(self, tensors: Sequence[tf.Tensor], state: list[tf.Tensor], sum_dense: Callable[..., Any]) -> Any:
        values = [tf.cast(each, tf.float32) for each in tensors]
        return sum_dense(tensors), [state[0] + 1, *(tf.where(tf.math.is_finite(each), each, 0.0) for each in values)]


def _shapes_of(model: keras.Model) -> list[tuple[int, ...]]:
    """Returns the shapes of a model's dense gradients."""
    optimizers = [each for each in optimizers_of(model) if each.built]
    trained = {id(each): each for optimizer in optimizers for each in trained_by(optimizer)}
    for layer in models.layers_of(model):
        # Of a table, the rows of a batch are sent as they are.
        if isinstance(layer, keras.layers.Embedding):
            for table in layer.trainable_variables:
                trained.pop(id(table), None)
    return [tuple(each.shape) for each in trained.values()]
