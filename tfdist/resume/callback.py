# SPDX-License-Identifier: Apache-2.0
"""Keras callback that saves checkpoints during training, and resumes training after a restart."""

from __future__ import annotations

import dataclasses
import itertools
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from tfdist import _checks, _forks, _log
from tfdist.compat.keras import calls, fit, saving
from tfdist.launchers.requests import TRY_AGAIN_EXIT_CODE
from tfdist.launchers.slurm import exits as slurm_exits
from tfdist.resume import checkpoint, preemption

# Numbers the calls of `fit` in this program; all workers make these calls in the same order.
_NUMBERS = itertools.count()


class Resume(keras.callbacks.Callback):
    """Saves the state of a training in a directory, from which `fit` continues when the program is started again.

        model.fit(x, y, epochs=10, callbacks=[tfdist.callbacks.Resume("checkpoints", save_freq=100)])

    The state has all that the next step depends on: variables of model, optimizers and metrics, state of policies and
    transforms, position in the data. On one device, and on several devices that train synchronously, an interrupted run
    has the same weights as an uninterrupted run, bit for bit. This requires the same order of the data in every run:
    shuffles have a seed, or `keras.utils.set_random_seed` was called.

    On SIGTERM the callback saves after the current step, and ends the program with exit code 75. Launchers of tfdist
    treat this code as a preemption: they start the job again and count no failure. Several workers end after the same
    step, whichever of them received the signal. A second SIGTERM has its usual effect.

    On several workers only the chief writes and reads, and broadcasts the restored state. So the directory need not be
    shared, as long as the chief stays on its machine. The last checkpoint stays after `fit` has ended: if the same
    program is started again, it trains no more. Use another directory for another training.

    Args:
      directory: directory of the checkpoints; a local path, or one of a mounted file system.
      save_freq: "epoch", or the number of steps between two checkpoints.
      max_to_keep: number of checkpoints that are kept, the newest ones; 1 or more.
      signals: signals that announce the end of the process.

    Raises:
      ValueError: an argument is invalid. When training begins: the checkpoint is of another model, or of other data.
      RuntimeError: when training begins: another training has the directory, or the training loop of this version of
        Keras is not supported.
      OSError: when training begins, or while saving: the directory can't be read, or written.
    """

    # See `compat.keras.calls.Call`: no logs of batches are read.
    follows_batches = False

    def __init__(
        self,
        directory: str | os.PathLike[str],
        save_freq: int | str = "epoch",
        *,
        max_to_keep: int = 2,
        signals: Sequence[int] = (signal.SIGTERM,),
    ) -> None:
        super().__init__()
        path = os.fspath(directory)
        if not path or "://" in path:
            raise ValueError(f"Resume(directory) must be a path of a file system. Received: directory={directory!r}")
        if save_freq != "epoch" and not _checks.is_count(save_freq, at_least=1):
            raise ValueError(
                'Resume(save_freq=...) must be "epoch", or a number of steps from 1 on. '
                f"Received: save_freq={save_freq!r}"
            )
        if not _checks.is_count(max_to_keep, at_least=1):
            raise ValueError(f"Resume(max_to_keep=...) must be 1 or more. Received: max_to_keep={max_to_keep!r}")
        # Also of models of no strategy.
        calls.follow()
        self._save_freq = save_freq
        self._checkpoints = checkpoint.CheckpointDirectory(path, max_to_keep, _log.say)
        self._path = path
        self._signals = preemption.Signals(
            signals, lambda: any(each is self for each in checkpoint.callbacks_of(self.model))
        )
        # Of several workers, while `fit` runs.
        self._others: preemption.Together | None = None
        self._position: checkpoint.DataPosition | None = None
        self._step = self._saved_step = 0
        self._epoch = self._epoch_step = 0
        # True while callbacks have averages in the place of the model's weights.
        self._has_averages = False
        # Restored values of the metrics in the resumed epoch, until Keras has reset the metrics.
        self._metrics: list[np.ndarray] | None = None
        # What other callbacks remembered, until they have begun; and whether their `fit` had ended.
        self._remembered: tuple[dict[str, Any], bool] | None = None

    @property
    def step(self) -> int:
        """Number of training steps, those before an interruption included."""
        return self._step

    # Methods that Keras calls.

    def on_train_begin(self, logs: Any = None) -> None:
        """Restores the newest checkpoint, if there is one."""
        self._close()
        call = calls.fit_of(self.model)
        if call is not None:
            call.ends.append(self._raised)
        slurm_exits.note_resumable()
        self._metrics = self._remembered = None
        self._has_averages = False
        self._step = self._epoch = self._epoch_step = 0
        # Changes by other callbacks at the end of an epoch, such as of the learning rate, belong into the checkpoint.
        checkpoint.put_last(self.model, self)
        self._position = checkpoint.DataPosition(self.model)
        found = self._take_newest()
        self._saved_step = self._step
        agreement = self._agreement()
        if self._signals.install() and agreement is not None:
            self._others = preemption.Together(agreement, f"preemption/{next(_NUMBERS)}", _exit_now, _log.say)
        if found and self._epoch >= self.params["epochs"]:
            text = f"step {self._step} in {self._path} is the end of this training: nothing is left to train"
            self._announce(f"{text}; more epochs go on, and another directory begins anew")
        elif found:
            where = f"epoch {self._epoch + 1}" + (f", step {self._epoch_step}" if self._epoch_step else "")
            self._announce(f"going on from {self._path}: step {self._step} ({where})")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Restores the metrics in a resumed epoch, and what other callbacks remember."""
        self._has_averages = False
        self._expect_position().began()
        if self._remembered is not None:
            for name in checkpoint.remind(self.model, *self._remembered):
                self._announce(
                    f"{name}(restore_best_weights=True) begins anew, as the weights that it kept are not saved; "
                    "ModelCheckpoint(save_best_only=True) keeps the best model in a file"
                )
            self._remembered = None
        if epoch != self._epoch:
            self._epoch, self._epoch_step = epoch, 0
        if self._metrics is None:
            return
        checkpoint.assign_metrics(self.model, self._metrics, self._agreement())
        self._metrics = None
        # Keras takes the logs from the epoch's last step, which may have been made before the interruption.
        fit.change_logs_once(self.model, lambda model, logs, logs_of: logs_of(logs or model.get_metrics_result()))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Saves if a checkpoint is due; saves and ends the program after a signal."""
        self._step += batch + 1 - self._epoch_step
        self._epoch_step = batch + 1
        if self._is_due():
            self._leave()
        # The last step of an epoch is saved in on_epoch_end, after the changes that other callbacks make there.
        is_due = self._save_freq != "epoch" and self._step - self._saved_step >= int(self._save_freq)
        if is_due and not self._expect_position().is_at_end_of_epoch:
            self._save()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Saves if a checkpoint is due; saves and ends the program after a signal."""
        self._has_averages = bool(checkpoint.swapping(self.model))
        self._epoch, self._epoch_step = epoch + 1, 0
        if self._is_due():
            self._leave()
        if self._save_freq == "epoch" or self._step - self._saved_step >= int(self._save_freq):
            self._save()

    def on_train_end(self, logs: Any = None) -> None:
        """Saves the final state, and restores the signal handlers."""
        # Also called here, because there may have been no epoch left.
        self._expect_position().began()
        is_ending = self._signals.received is not None
        if self._others is not None:
            is_ending = self._others.is_ending(is_ending)
        if is_ending:
            self._leave()
        # Also after the last epoch was saved: callbacks such as EarlyStopping may have restored other weights.
        self._save(is_end=True)
        self._close()
        if self._signals.received is not None:
            # The signal arrived while the final state was saved, and all workers are done: its usual effect.
            os.kill(os.getpid(), self._signals.received)

    def _is_due(self) -> bool:
        is_requested = self._signals.received is not None
        if self._others is None:
            return is_requested
        is_synchronized = lambda: checkpoint.saved_state_of(self.model).is_synchronized  # noqa: E731
        return self._others.is_due(self._step, is_requested, is_synchronized)

    # Saving.

    def _save(self, is_end: bool = False) -> None:
        if self._step == self._saved_step and not is_end:
            return
        strategy_state = checkpoint.saved_state_of(self.model)
        # A call that all workers make, because they save after the same steps.
        strategy_state.synchronize()
        self._saved_step = self._step
        agreement = self._agreement()
        is_writer = agreement is None or agreement.is_chief
        of_workers, worker_arrays = strategy_state.collect_state(self.model)
        # Between epochs the metrics have no state.
        metrics = checkpoint.metrics_of(self.model) if self._epoch_step else []
        with self.model.distribute_strategy.scope():
            # Each worker has a part of the counts, so all workers must read them together.
            is_ahead = strategy_state.is_chief_ahead
            counts = [checkpoint.count_of(metric, is_ahead) for metric in metrics if is_writer or not is_ahead]
            if not is_writer:
                return
            variables = checkpoint.variables_of(self.model)
            arrays = [*map(checkpoint.to_save, variables), *counts, *worker_arrays]
        state = {
            "place": dataclasses.asdict(self._expect_position().of(self._epoch, self._epoch_step)),
            "variables": checkpoint.describe_variables(variables),
            "metrics": checkpoint.describe_variables(metrics),
            "optimizers": checkpoint.built_of(self.model),
            "policies": strategy_state.state(),
            "workers": of_workers,
            "callbacks": checkpoint.remembered_by(self.model),
            "has_averages": self._has_averages,
            # Number of epochs of a `fit` that has ended, by itself or stopped early.
            "ended": self.params["epochs"] if is_end else None,
            "keras": keras.__version__,
        }
        with saving.announced_save(self.model.distribute_strategy, self._path):
            self._checkpoints.save(checkpoint.Checkpoint(self._step, state, tuple(arrays)))

    def _leave(self) -> None:
        """Saves, and ends the program."""
        self._save()
        name = signal.Signals(self._signals.received).name if self._signals.received else ""
        if self._others is not None:
            self._others.saved()
            name = name or f"{self._others.asked_by or 'another worker'} received a signal"
        self._announce(f"{name}: step {self._step} is saved in {self._path}; ending with code {TRY_AGAIN_EXIT_CODE}")
        self._close()
        distribution = checkpoint.distribution_of(self.model)
        if distribution is not None and distribution.serving is not None:
            distribution.serving.is_abandoned = True
        if self._agreement() is not None:
            for number in self._signals.numbers:
                # A launcher that has seen another worker end sends the signal again, while this one is ending already.
                signal.signal(number, signal.SIG_IGN)
            # TensorFlow's own shutdown sometimes hangs when other workers of its cluster have ended.
            _forks.at_exit(_exit_now)
        raise SystemExit(TRY_AGAIN_EXIT_CODE)

    # Going on.

    def _take_newest(self) -> bool:
        """Restores the newest checkpoint; returns False if there is none."""
        agreement = self._agreement()
        newest: checkpoint.Checkpoint | None = None

        def read() -> dict[str, Any] | None:
            nonlocal newest
            self._checkpoints.take()
            newest = self._checkpoints.newest()
            return None if newest is None else {"step": newest.step, "state": newest.state}

        if agreement is not None:
            # The chief alone would notice no other before the end of training.
            with agreement.calling("the callback Resume"):
                agreement.gather(None, "reading the newest checkpoint")
        found = read() if agreement is None else agreement.from_chief(read, "reading the newest checkpoint")
        if found is None:
            return False
        state = found["state"]
        checkpoint.build_variables(self.model, state["optimizers"], self._expect_position().element_spec)
        variables, metrics = checkpoint.variables_of(self.model), checkpoint.metrics_of(self.model)
        checkpoint.check_same(state["variables"], checkpoint.describe_variables(variables), self._path)
        arrays = newest.arrays if newest else ()
        self._has_averages, swapping = state.get("has_averages", False), checkpoint.swapping(self.model)
        if self._has_averages and not swapping:
            self._announce(
                "the checkpoint has averages of SwapEMAWeights for weights; without it `fit` goes on from them"
            )
        for each in swapping:
            # Marks what is restored next as averages, which the callback swaps back when the epoch begins; or as none.
            each.on_epoch_end(-1) if self._has_averages else each.on_epoch_begin(0)
        checkpoint.assign(self.model, variables, arrays[: len(variables)], agreement)
        num_others = len(variables) + len(state["metrics"])
        saved_state = checkpoint.saved_state_of(self.model)
        for name in saved_state.distribute_state(self.model, state.get("workers"), arrays[num_others:]):
            self._announce(f"the checkpoint has state of {name}, which this strategy is without; it is left out")
        place = checkpoint.Place(**state["place"])
        if state["ended"] is not None and state["ended"] >= self.params["epochs"]:
            place = dataclasses.replace(place, epoch=self.params["epochs"], step=0)
        if place.step:
            # Metrics that are created in the first step don't exist yet.
            self._metrics = list(arrays[len(variables) : num_others])
            if [kind for _, *kind in state["metrics"]] != [kind for _, *kind in checkpoint.describe_variables(metrics)]:
                self._metrics = None
                self._announce("the metrics of this epoch count from here on: before its first step there are none")
        saved_state.restore(state["policies"], bool(place.step))
        self._remembered = state.get("callbacks", {}), state["ended"] is not None
        self._expect_position().go_to(place)
        self._step, self._epoch, self._epoch_step = found["step"], place.epoch, place.step
        return True

    # Other workers.

    def _agreement(self) -> Any:
        distribution = checkpoint.distribution_of(self.model)
        return distribution and distribution.agreement

    def _announce(self, line: str) -> None:
        agreement = self._agreement()
        if agreement is None or agreement.is_chief:
            _log.say(line)

    def _expect_position(self) -> checkpoint.DataPosition:
        if self._position is None:
            raise RuntimeError("Resume: on_train_begin was not called")
        return self._position

    def _raised(self, error: BaseException) -> None:
        """Ends what a training has begun that has raised; Keras calls `on_train_end` only without an error."""
        if self._position is not None:
            self._position.began()
        self._close()

    def _close(self) -> None:
        self._signals.uninstall()
        self._checkpoints.release()
        if self._others is not None:
            self._others.close()
            self._others = None


def _exit_now() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(TRY_AGAIN_EXIT_CODE)
