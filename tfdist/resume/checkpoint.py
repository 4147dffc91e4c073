# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in a directory, written atomically.

A checkpoint is a folder `step-<number>` with `variables.npz` and `state.json`, which describes the variables. It is
written under another name, flushed to disk, and renamed. So the newest complete checkpoint survives a crash at any
time.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import re
import secrets
import shutil
import socket
import struct
import threading
import time
import zipfile
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import IO, Any

import keras
import numpy as np
import tensorflow as tf

from tfdist import _files, _log
from tfdist.compat import patching
from tfdist.compat.keras import calls, fit, models, optimizers, sharding
from tfdist.compat.keras.optimizers import optimizers_of
from tfdist.passes import handle, progress
from tfdist.policies.saved_state import SavedState
from tfdist.step import one_replica

# Files of NumPy arrays (`.npz`), of which those of tables are written and read a block of rows at a time.


def write(file: IO[bytes], arrays: Sequence[np.ndarray | sharding.TableRows]) -> None:
    """Writes what `np.savez` would write of the arrays by their numbers, which `np.load` reads."""
    with zipfile.ZipFile(file, "w") as archive:
        for index, array in enumerate(arrays):
            with archive.open(f"{index}.npy", "w", force_zip64=True) as member:
                if isinstance(array, sharding.TableRows):
                    descr = np.lib.format.dtype_to_descr(array.dtype)
                    header = {"descr": descr, "fortran_order": False, "shape": array.shape}
                    np.lib.format.write_array_header_1_0(member, header)
                    for first, last in sharding.row_blocks(array.shape, array.dtype.itemsize):
                        member.write(np.ascontiguousarray(array[first:last]).view(np.uint8).data)
                else:
                    np.lib.format.write_array(member, np.asanyarray(array), allow_pickle=False)


def read(path: pathlib.Path, count: int, by_rows: Collection[int]) -> tuple[np.ndarray, ...]:
    """Reads arrays 0 to count - 1; those with a number in `by_rows` are looked through, and mapped from the file.

    Raises:
      ValueError: or another error that damaged files raise.
    """
    with np.load(path, allow_pickle=False) as arrays:
        return tuple(_mapped(path, f"{i}.npy") if i in by_rows else arrays[str(i)] for i in range(count))


def _mapped(path: pathlib.Path, name: str) -> np.memmap:
    with zipfile.ZipFile(path) as archive, archive.open(name) as member:
        # To the end, where the check sum is compared.
        while member.read(1 << 20):
            pass
        begin = archive.getinfo(name).header_offset
    with path.open("rb") as file:
        # Nothing is compressed: the array's own header follows 30 bytes, a name and an extra field of these lengths.
        file.seek(begin + 26)
        file.seek(sum(struct.unpack("<HH", file.read(4))), os.SEEK_CUR)
        np.lib.format.read_magic(file)
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        return np.memmap(file, dtype, "r", file.tell(), shape)


_NAME = re.compile(r"step-(\d{10,})")
_WRITING = ".writing-"
_UNREADABLE = "unreadable-"
_OLD = ".old-"
_STATE, _VARIABLES = "state.json", "variables.npz"
_OWNER = ".owner.json"
# Time between two beats of the training that has the directory, and without a beat after which it has ended.
_BEAT_SECS, _SILENT_SECS = 1.0, 5.0
# Errors that reading a damaged file raises, without those of a file system that is temporarily unavailable.
_DAMAGES = (ValueError, KeyError, TypeError, EOFError, NotImplementedError, zipfile.BadZipFile, zlib.error)


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """State of a training after a step.

    Attributes:
      step: number of training steps before.
      state: JSON data.
      arrays: values of the variables.
    """

    step: int
    state: dict[str, Any]
    arrays: tuple[np.ndarray | sharding.TableRows, ...]


class CheckpointDirectory:
    """The checkpoints of one training. One process writes, any process may read.

    Two jobs with one directory would continue from each other's checkpoints, and remove them. So a training has a file
    there that names it, and touches it until it ends: a lock that the dead do not keep, on any file system.

    Args:
      path: the directory; created by the first `save`.
      max_to_keep: number of checkpoints that are kept, the newest ones.
      say: writes a line to the log.
    """

    def __init__(self, path: str | os.PathLike[str], max_to_keep: int, say: Callable[[str], object]) -> None:
        self._path = pathlib.Path(path)
        self._max_to_keep = max_to_keep
        self._say = say
        self._owner = {"host": socket.gethostname(), "process": os.getpid(), "job": secrets.token_hex(8)}
        self._released = threading.Event()
        self._beating: threading.Thread | None = None

    def take(self) -> None:
        """Reserves the directory for this training until `release`.

        Raises:
          RuntimeError: another training that is running has it.
          OSError: the directory can't be written.
        """
        self.release()
        self._path.mkdir(parents=True, exist_ok=True)
        before, until = self._read_owner(), time.monotonic() + _SILENT_SECS
        while (owner := self._read_owner()) and not _has_ended(owner) and time.monotonic() < until:
            if owner != before:
                raise RuntimeError(
                    f"Resume(directory): another training writes to it, process {owner['process']} on {owner['host']}; "
                    f"end that one, or give this one another directory. Received: directory={str(self._path)!r}"
                )
            time.sleep(_BEAT_SECS / 5)
        self._released.clear()
        _files.write(self._path / _OWNER, json.dumps(self._owner))
        self._beating = threading.Thread(target=self._beat, name="tfdist resume", daemon=True)
        self._beating.start()

    def release(self) -> None:
        """Lets other trainings have the directory; may be called again."""
        if self._beating is not None:
            self._released.set()
            self._beating.join()
            if self._is_owner():
                (self._path / _OWNER).unlink(missing_ok=True)
            self._beating = None

    def _beat(self) -> None:
        while not self._released.wait(_BEAT_SECS) and self._is_owner():
            with contextlib.suppress(OSError):
                os.utime(self._path / _OWNER)

    def _read_owner(self) -> dict[str, Any] | None:
        try:
            with (self._path / _OWNER).open("rb") as file:
                return {**json.load(file), "beat": os.fstat(file.fileno()).st_mtime_ns}
        except (OSError, ValueError):
            return None

    def _is_owner(self) -> bool:
        found = self._read_owner()
        return found is None or found["job"] == self._owner["job"]

    def save(self, checkpoint: Checkpoint) -> None:
        """Writes a checkpoint; replaces one of the same step.

        Raises:
          RuntimeError: another training has the directory by now.
          OSError: the directory can't be written. The checkpoints before are whole.
        """
        if not self._is_owner():
            raise RuntimeError(
                "Resume(directory): another one has the directory, since this training was stopped for a while, or has "
                f"begun at the same time; end one of the two. Received: directory={str(self._path)!r}"
            )
        try:
            self._save(checkpoint)
        except OSError as error:
            # A part of a checkpoint would keep the room that is missing.
            shutil.rmtree(self._path / f"{_WRITING}step-{checkpoint.step:010d}", ignore_errors=True)
            newest = next((f"; {folder.name} is whole" for folder in self._found()), "; there is no other checkpoint")
            text = f"{os.strerror(error.errno or 0)}: step {checkpoint.step} can't be saved in {self._path}{newest}"
            raise OSError(error.errno, f"{text}. Make room there, and start the training again") from error

    def _save(self, checkpoint: Checkpoint) -> None:
        self._path.mkdir(parents=True, exist_ok=True)
        # Remains of a process that was killed while it wrote; what it was about to replace is a checkpoint again.
        for kept in self._found():
            if kept.name.startswith(_OLD):
                kept.rename(kept.with_name(kept.name.removeprefix(_OLD)))
        for left in [*self._path.glob(f"{_WRITING}*"), *self._path.glob(f"{_OLD}*")]:
            shutil.rmtree(left, ignore_errors=True)
        name = f"step-{checkpoint.step:010d}"
        unfinished = self._path / f"{_WRITING}{name}"
        unfinished.mkdir()
        with (unfinished / _VARIABLES).open("wb") as file:
            write(file, checkpoint.arrays)
            os.fsync(file.fileno())
        with (unfinished / _STATE).open("w", encoding="utf-8") as file:
            by_rows = [index for index, array in enumerate(checkpoint.arrays) if isinstance(array, sharding.TableRows)]
            counts = {"step": checkpoint.step, "arrays": len(checkpoint.arrays), "by_rows": by_rows}
            json.dump({**counts, "state": checkpoint.state}, file)
            file.flush()
            os.fsync(file.fileno())
        _sync_directory(unfinished)
        final, old = self._path / name, self._path / f"{_OLD}{name}"
        if final.exists():
            final.rename(old)
        unfinished.rename(final)
        shutil.rmtree(old, ignore_errors=True)
        _sync_directory(self._path)
        for old in self._found()[self._max_to_keep :]:
            shutil.rmtree(old, ignore_errors=True)

    def newest(self) -> Checkpoint | None:
        """Returns the newest readable checkpoint, or None. Renames and reports an unreadable one.

        Raises:
          OSError: the directory can't be read.
        """
        for folder in self._found():
            try:
                found = json.loads((folder / _STATE).read_text(encoding="utf-8"))
                # Checkpoints of tfdist 0.1 don't have "by_rows".
                arrays = read(folder / _VARIABLES, found["arrays"], found.get("by_rows", ()))
                return Checkpoint(found["step"], found["state"], arrays)
            except (FileNotFoundError, *_DAMAGES) as error:
                self._say(f"{folder} can't be read, and is put aside: {type(error).__name__}: {error}")
                with contextlib.suppress(OSError):
                    folder.rename(folder.with_name(_UNREADABLE + folder.name))
        return None

    def _found(self) -> list[pathlib.Path]:
        """Returns the folders of checkpoints, the newest first; also one to be replaced by another that isn't there."""
        if not self._path.exists():
            return []
        found = {path.name.removeprefix(_OLD): path for path in self._path.glob(f"{_OLD}*")}
        found |= {path.name: path for path in self._path.iterdir()}
        steps = {int(match[1]): path for name, path in found.items() if (match := _NAME.fullmatch(name))}
        return [steps[step] for step in sorted(steps, reverse=True)]


def _has_ended(owner: Mapping[str, Any]) -> bool:
    """Returns True if the owner was a process of this machine that has ended."""
    if owner["host"] != socket.gethostname():
        return False
    try:
        os.kill(owner["process"], 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    # As in a container that was started again, where processes have the same numbers.
    return owner["process"] == os.getpid()


def check_same(saved: Sequence[Sequence[Any]], found: Sequence[Sequence[Any]], path: str | os.PathLike[str]) -> None:
    """Checks that a checkpoint fits the model.

    Args:
      saved: (name, shape, dtype) of each variable in the checkpoint.
      found: (name, shape, dtype) of each variable of the model. Names may differ, because Keras numbers layers through
        the whole process.
      path: the directory, for the message.

    Raises:
      ValueError: shapes, dtypes or the number of variables differ.
    """
    for there, here in itertools.zip_longest(saved, found, fillvalue=("no variable", [], "")):
        if list(there[1:]) != list(here[1:]):
            (name, shape, dtype), (own_name, own_shape, own_dtype) = there, here
            raise ValueError(
                f"Resume(directory): {path} has a checkpoint of another model or optimizer, with {len(saved)} "
                f"variables: {name} is {dtype}{list(shape)} there; to train it from the start give Resume another "
                f"directory, or an empty one. Received: {len(found)} variables, {own_name}, {own_dtype}{[*own_shape]}"
            )


def _sync_directory(path: pathlib.Path) -> None:
    # Not every file system lets a directory be opened, or synchronised.
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


# Variables of a model that are in a checkpoint: their list, their values, and how these are assigned again.


def built_of(model: keras.Model) -> list[list[int] | None]:
    """Returns, for each optimizer, the indices of its variables in `model.trainable_variables`; None if not built."""
    numbers = {id(variable): index for index, variable in enumerate(model.trainable_variables)}
    return [
        [numbers[id(variable)] for variable in optimizers.trained_by(optimizer) if id(variable) in numbers]
        if optimizer.built
        else None
        for optimizer in optimizers_of(model)
    ]


def variables_of(model: keras.Model) -> list[Any]:
    """Returns the variables of the model, its optimizers and policies, without metrics, in the same order each run."""
    metrics = {id(variable) for variable in metrics_of(model)}
    found = [*one_replica.variables_of(model), *saved_state_of(model).variables(model)]
    return [variable for variable in found if id(variable) not in metrics]


def metrics_of(model: keras.Model) -> list[Any]:
    """Returns the variables of the model's metrics, each once."""
    return list({id(variable): variable for variable in model.metrics_variables}.values())


def describe_variables(variables: Sequence[Any]) -> list[list[Any]]:
    """Returns [path, shape, dtype] of each variable, as JSON data."""
    return [[variable.path, list(variable.shape), str(variable.dtype)] for variable in variables]


def to_array(variable: Any) -> np.ndarray:
    """Returns the variable's value, with its shape and dtype."""
    return np.asarray(tf.convert_to_tensor(variable.value))


def to_save(variable: Any) -> np.ndarray | sharding.TableRows:
    """Returns the variable's value; that of a table in shards is read from its servers as it is written."""
    table = sharding.in_shards(variable)
    return to_array(variable) if table is None else sharding.TableRows(table)


def assign(model: keras.Model, variables: Sequence[Any], arrays: Sequence[np.ndarray], agreement: Any) -> None:
    """Assigns `arrays` to the variables, on all workers; the chief broadcasts its values."""
    with model.distribute_strategy.scope():
        if agreement is None or agreement.is_chief:
            for variable, array in zip(variables, arrays, strict=True):
                # NumPy reads a dtype that it doesn't know, such as bfloat16, as raw bytes.
                is_raw = array.dtype.kind == "V"
                variable.assign(array.view(tf.as_dtype(variable.dtype).as_numpy_dtype) if is_raw else array)
        if agreement is not None:
            model.distribute_strategy.distribution.broadcast(variables)


def count_of(metric: Any, is_ahead: bool) -> np.ndarray:
    """Returns the value of a metric's variable over all replicas; of the first replica if `is_ahead` (warmup)."""
    return np.asarray(tf.convert_to_tensor(one_replica.copies_of(metric)[0])) if is_ahead else to_array(metric)


def assign_metrics(model: keras.Model, arrays: Sequence[np.ndarray], agreement: Any) -> None:
    """Assigns restored values to the metrics. Replicas' counts are summed, so the first replica gets the whole sum."""
    pairs = list(itertools.zip_longest(metrics_of(model), arrays))
    is_first = agreement is None or agreement.is_chief
    with model.distribute_strategy.scope():
        for metric, array in pairs:
            if one_replica.is_counter(metric):
                for index, copy in enumerate(one_replica.copies_of(metric)):
                    copy.assign(array if is_first and not index else tf.zeros_like(copy))
    others = [(metric, array) for metric, array in pairs if not one_replica.is_counter(metric)]
    assign(model, [metric for metric, _ in others], [array for _, array in others], agreement)


def distribution_of(model: keras.Model) -> Any:
    """Returns the `tfdist.strategies.distribution.Distribution` of the model's strategy; None if it is a stock one."""
    return getattr(model.distribute_strategy, "distribution", None)


def saved_state_of(model: keras.Model) -> SavedState:
    """Returns the state that the model's strategy has to save; none if it is no strategy of tfdist."""
    distribution = distribution_of(model)
    return SavedState() if distribution is None else distribution.saved_state


def build_variables(model: keras.Model, optimizers: Sequence[Sequence[int] | None], element_spec: Any) -> None:
    """Creates the variables for which a checkpoint has values, as the first step would.

    Args:
      model: the compiled model.
      optimizers: result of `built_of` when the checkpoint was written.
      element_spec: structure of `tf.TypeSpec`s of a batch.
    """
    with model.distribute_strategy.scope():
        if not model.built:
            _build_symbolically(model, element_spec)
        for optimizer, indices in zip(optimizers_of(model), optimizers, strict=False):
            if not optimizer.built and indices is not None:
                optimizer.build([model.trainable_variables[index] for index in indices])
        # For the metrics. Only with a built optimizer, because it would build the optimizer for all variables. A user's
        # own train_step may not need this, and the model may lack `call` or `compute_metrics`.
        if model.optimizer.built:
            with contextlib.suppress(Exception):
                _build_symbolically(model, element_spec)


def _build_symbolically(model: keras.Model, element_spec: Any) -> None:
    models.build_by_keras(model, handle.without_none_specs(element_spec))


# Position of `fit` in its data: saved in a checkpoint, and restored.
#
# `fit` makes one iterator over the data for each epoch, and one more at the epoch's end that it discards. With
# `steps_per_epoch` it continues one iterator over several epochs. A checkpoint has the number of iterators made, and
# the number of batches taken from the last one. So deterministic data have the same order as in an uninterrupted run.


@dataclasses.dataclass(frozen=True)
class Place:
    """A position between two steps of `fit`.

    Attributes:
      epoch: the epoch, counted from 0.
      step: number of steps made in this epoch.
      num_iterators: number of iterators made over the data.
      batches: number of batches taken from the last iterator.
      num_batches: number of batches in a pass over the data; None if unknown.
      num_read: number of iterators before the one to continue with from which batches were taken.
    """

    epoch: int
    step: int
    num_iterators: int
    batches: int
    num_batches: int | None
    num_read: int = 0


class DataPosition:
    """Tracks the position of one running `fit` in its data.

    Args:
      model: the model whose `fit` is running in this thread.

    Raises:
      RuntimeError: no `fit` of the model is running, or the loop of this version of Keras is not supported.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        found = fit.EpochIterator.of(model)
        if found is None:
            raise RuntimeError(
                "Resume needs a running fit of the model whose loop it knows; its loop has changed with Keras "
                f"{keras.__version__}, or on_train_begin was called by something else. Received: {model.name!r}"
            )
        self._epochs = found
        # Number of iterators that `fit` has made, and number of those made before the interruption.
        self._num_iterators = self._num_iterators_before = 0
        # Number of iterators before the newest from which batches were taken.
        self._num_read = 0
        # Data set of the next iterator, once, in place of the whole data set.
        self._next: Any = None
        self._first_epoch = calls.first_epoch_of(model)
        self._epochs.replace_data(self._counting)

    @property
    def element_spec(self) -> Any:
        """The structure of `tf.TypeSpec`s of a batch."""
        return self._epochs.dataset.element_spec

    def of(self, epoch: int, step: int) -> Place:
        """Returns the position after so many steps of an epoch."""
        epochs = self._epochs
        # With steps_per_epoch `fit` continues the same iterator; else each epoch begins with a new one.
        is_between = not step and not epochs.goes_on
        batches, passes = 0 if is_between else epochs.batches_taken, self._num_passes()
        if not is_between and not batches:
            # The iterator to continue exists, but no batch was taken from it: `fit` will make it again.
            passes -= 1
        read = self._num_read + (is_between and epochs.batches_taken > 0)
        return Place(epoch, step, passes, batches, epochs.num_batches, read)

    def _num_passes(self) -> int:
        # Some data sets count the iterators themselves, those of the rest of a resumed pass included.
        made = getattr(self._epochs.dataset, "passes", self._num_iterators)
        return self._num_iterators_before + made

    @property
    def is_at_end_of_epoch(self) -> bool:
        """True if the last step is known to be the last one of its epoch."""
        return self._epochs.is_at_end_of_epoch

    def go_to(self, place: Place) -> None:
        """Makes `fit`, which is about to begin, begin at this position.

        Raises:
          ValueError: the data have another length than in the checkpoint.
        """
        known = self._epochs.num_batches_given
        if known and place.num_batches and known != place.num_batches:
            raise ValueError(
                f"Resume(directory): the checkpoint is of a fit over {place.num_batches} batches per pass; give the "
                f"same data and batch size, or another directory. Received: {known} batches"
            )
        self._epochs.num_batches = place.num_batches
        calls.begin_with_epoch(self._model, place.epoch)
        is_between = not place.batches
        before = place.num_iterators - (0 if is_between else 1) - self._num_passes()
        rest = self._rest(max(0, before), place.batches, max(0, place.num_read - self._num_read))
        self._num_read = place.num_read
        self._num_iterators_before += place.num_iterators - self._num_passes()
        if is_between:
            return
        # The iterator to continue is among these.
        self._num_iterators -= 1
        if place.step:
            self._epochs.begin_within_epoch(place.step, place.batches, lambda: setattr(self, "_next", rest))
        else:
            # With steps_per_epoch: a new epoch continues an iterator.
            self._next = rest
            self._epochs.continue_epochs(place.batches)

    def began(self) -> None:
        """Restores the model's initial epoch for a later `fit`, once this one has begun its first epoch."""
        calls.begin_with_epoch(self._model, self._first_epoch)

    def _rest(self, passes: int, batches: int, reads: int) -> Any:
        restart = progress.restart_of(self._epochs.dataset)
        if restart is not None:
            restart.draw_below(reads)
            return restart.after(passes, batches)
        if batches:
            _log.say(
                f"a {type(self._epochs.dataset).__name__} of the user's own can't be begun in the "
                "middle; the rest of the epoch is made from its first batches"
            )
        return self._epochs.dataset

    def _counting(self, data: Callable[[], Any]) -> Callable[[], Any]:
        def data_of_next() -> Any:
            self._num_iterators += 1
            self._num_read += self._epochs.batches_taken > 0
            rest, self._next = self._next, None
            return data() if rest is None else rest

        return data_of_next


def put_last(model: keras.Model, callback: keras.callbacks.Callback) -> None:
    """Moves the callback to the end of the running `fit`'s callbacks, from the next call on."""
    fit = calls.fit_of(model)
    callbacks = None if fit is None else fit.callbacks
    if isinstance(callbacks, keras.callbacks.CallbackList):
        # A new list, because Keras is iterating over the present one.
        callbacks.callbacks = [*(each for each in callbacks.callbacks if each is not callback), callback]


def callbacks_of(model: keras.Model) -> list[Any]:
    """Returns the callbacks of the `fit` of this model in this thread."""
    fit = calls.fit_of(model)
    return [] if fit is None else fit.each_callback


def swapping(model: keras.Model) -> list[Any]:
    """Returns the callbacks of this `fit` that put averages in the place of the model's weights between epochs."""
    return [
        each for each in callbacks_of(model) if isinstance(each, keras.callbacks.SwapEMAWeights) and each.swap_on_epoch
    ]


# What Keras' own callbacks remember of a metric, in public attributes: without it, a `ModelCheckpoint` writes the first
# model after a restart over the best one.


_REMEMBERED = ("best", "wait", "best_epoch", "cooldown_counter")
_CHECKPOINT = keras.callbacks.ModelCheckpoint
_REMEMBERING = (_CHECKPOINT, keras.callbacks.EarlyStopping, keras.callbacks.ReduceLROnPlateau)


def _remembering(model: keras.Model) -> dict[str, keras.callbacks.Callback]:
    """Returns these callbacks by class and number; a worker may have fewer than the chief."""
    found: dict[str, keras.callbacks.Callback] = {}
    counts = collections.Counter[str]()
    for callback in callbacks_of(model):
        if isinstance(callback, _REMEMBERING):
            name = type(callback).__name__
            found[f"{name} {counts[name]}"] = callback
            counts[name] += 1
    return found


def remembered_by(model: keras.Model) -> dict[str, dict[str, float]]:
    """Returns what the callbacks remember: JSON data."""
    return {
        key: {name: float(each) for name in _REMEMBERED if (each := getattr(callback, name, None)) is not None}
        for key, callback in _remembering(model).items()
    }


def remind(model: keras.Model, states: Mapping[str, Mapping[str, float]], has_ended: bool) -> list[str]:
    """Gives the callbacks what `remembered_by` returned.

    Args:
      model: the model.
      states: what they remembered.
      has_ended: whether the `fit` had ended; for another one, all but a `ModelCheckpoint` begin anew in Keras, too.

    Returns:
      Names of callbacks that begin anew because of the weights that they had kept.
    """
    anew: list[str] = []
    for key, callback in _remembering(model).items():
        state = states.get(key, {})
        if has_ended and not isinstance(callback, _CHECKPOINT):
            continue
        if getattr(callback, "restore_best_weights", False) and "best" in state:
            anew.append(type(callback).__name__)
            continue
        for name, value in state.items():
            patching.put(callback, name, value if name == "best" else int(value))
    return anew
