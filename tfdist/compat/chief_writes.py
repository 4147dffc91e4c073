# SPDX-License-Identifier: Apache-2.0
"""Files and progress are written by the chief alone, while every worker runs the same script and the same callbacks.

Keras 3 has no notion of a chief: all workers would write the same files at once. Reading a model's variables may need
all workers, so all of them go through the same saving; the others do it in a directory of their own that is removed.
When a save returns, on any worker, the chief's file is complete. The chief waits for nobody, so it may also save alone,
where reading the variables needs no other worker. A worker that saves under another path than the chief, as in a
temporary directory of its own, keeps its file there. With `verbose="auto"`, Keras' default, only the chief shows a
progress bar: all workers have the same logs.

There is no public way: callbacks and models write by functions that none of them takes as an argument. So the functions
and methods in `_WRAPPED` are replaced, for good, for models of a `MultiWorkerMirroredStrategy` on several workers; any
other model is saved by stock Keras. `check` compares the installed Keras with the functions that are wrapped.
"""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import functools
import inspect
import os
import pathlib
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import keras
from keras.src.legacy.saving import legacy_h5_format
from keras.src.saving import saving_lib
from keras.src.utils import file_utils

from tfdist.compat import replacing, saved_attributes
from tfdist.runtime import messages

NEEDS = (
    "keras.src.legacy.saving.legacy_h5_format:save_model_to_hdf5(model, filepath)",
    "keras.src.saving.saving_lib:save_model(model, filepath)",
    "keras.src.saving.saving_lib:save_weights_only(model, filepath)",
    "keras:Model._initial_epoch",
    "keras.src.utils.file_utils:copy",
    "keras.src.utils.file_utils:exists",
    "keras.src.utils.file_utils:is_remote_path",
    "keras.src.utils.file_utils:join",
    "keras.src.utils.file_utils:makedirs",
    "keras:callbacks.BackupAndRestore._save_model",
    "keras:callbacks.BackupAndRestore._weights_path",
    "keras:callbacks.ModelCheckpoint._get_file_path(epoch, batch, logs)",
    "keras:callbacks.ModelCheckpoint._save_model(epoch, batch, logs)",
)

# The user's calls that end in a wrapped function.
_CALLS = {
    "save_model": "model.save",
    "save_weights_only": "model.save_weights",
    "save_model_to_hdf5": "model.save",
    "export": "model.export",
}

_BACKUP_PATHS = (
    "backup_dir",
    "_weights_path",
    "_training_metadata_path",
    "_prev_weights_path",
    "_prev_training_metadata_path",
)


class Agreement(Protocol):
    """Broadcast of results from the chief to the workers that train a model."""

    @property
    def is_chief(self) -> bool:
        """True on the chief."""
        ...

    def from_chief(self, value: Callable[[], Any], what: str, detail: str = "") -> Any:
        """Calls `value` on the chief only, and returns its result (JSON data) on every worker."""
        ...

    def from_chief_at(self, place: str, name: str, value: Callable[[], Any], what: str) -> Any:
        """Like `from_chief`, in a call that the chief may also make alone."""
        ...

    def meet(self, call: str, what: str) -> None:
        """Waits until all workers are in a call of the user's that only some may have."""
        ...

    def calling(self, call: str) -> contextlib.AbstractContextManager[None]:
        """Within the block this worker is in a call of the user's, such as "model.save"."""
        ...


def install() -> None:
    """Wraps what Keras writes files with, once per process.

    Raises:
      RuntimeError: this version of Keras is not the one that this module knows.
    """
    problems = check()
    if problems:
        raise RuntimeError(
            "MultiWorkerMirroredStrategy does not know how this version of Keras writes files; use another version. "
            f"Received: keras {keras.__version__}: {'; '.join(problems)}"
        )
    for owner, name, wrap, _ in _WRAPPED:
        replacing.once(owner, name, wrap)


def check() -> list[str]:
    """Returns the differences between the installed Keras and the methods wrapped here; empty if there are none."""
    problems = []
    for owner, name, _, parameters in _WRAPPED:
        found = getattr(owner, name, None)
        if found is None:
            problems.append(f"{owner.__name__}.{name} is gone")
        elif tuple(inspect.signature(found).parameters)[: len(parameters)] != parameters:
            problems.append(f"{owner.__name__}.{name} takes {tuple(inspect.signature(found).parameters)}")
    backup = keras.callbacks.BackupAndRestore("unused")
    problems += [f"BackupAndRestore.{name} is gone" for name in _BACKUP_PATHS if not hasattr(backup, name)]
    return problems


def _agreement(model: Any) -> Agreement | None:
    """Returns the agreement of the workers that train this model; None if a single process trains it."""
    distribution = getattr(getattr(model, "distribute_strategy", None), "distribution", None)
    return distribution and distribution.agreement


@functools.cache
def _scratch() -> str:
    """Makes a directory for files of this worker that are discarded; removed at the end of the process."""
    path = tempfile.mkdtemp(prefix="tfdist-")
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


def _in_scratch(path: Any) -> str:
    return str(pathlib.Path(tempfile.mkdtemp(dir=_scratch())) / pathlib.Path(os.fspath(path)).name)


# Saving: save_model(model, filepath, ...) and its like.


def _wrap_save(original: Callable[..., Any]) -> Callable[..., Any]:
    call = _CALLS[original.__name__]

    def save(model: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
        agreement = _agreement(model)
        if agreement is None or not isinstance(filepath, str | os.PathLike):
            return original(model, filepath, *args, **kwargs)
        with agreement.calling(call):
            return _save_together(agreement, model, filepath, lambda path: original(model, path, *args, **kwargs))

    return save


def _save_together(agreement: Agreement, model: Any, filepath: Any, save: Callable[[str], Any]) -> None:
    path = os.fspath(filepath)
    # Workers that save under names of their own number them, or have them in directories of their own.
    place, name = _place(model), re.sub(r"[0-9]+", "#", pathlib.PurePath(path).name)

    def write() -> list[str]:
        with _staging(path) as staging:
            save(str(staging / pathlib.Path(path).name))
            _publish(staging, path)
        return _names(path)

    what = f"saving {path}"
    if not agreement.is_chief:
        # Of a callback, whose path leads to the scratch directory.
        what = f"saving {_intended.get() or path}"
        staged = _in_scratch(path)
        save(staged)
        of_chief = agreement.from_chief_at(place, name, write, what)
        _keep_own(pathlib.Path(staged).parent, path, of_chief)
    else:
        agreement.from_chief_at(place, name, write, what)


def _place(model: Any) -> str:
    """A name for the place of a save in the program that is the same on all workers: the model's step."""
    optimizer = getattr(model, "optimizer", None)
    # While the chief trains alone, its optimizer is ahead.
    is_ahead = model.distribute_strategy.distribution.saved_state.is_chief_ahead
    step = 0 if optimizer is None or is_ahead else int(keras.ops.convert_to_numpy(optimizer.iterations))
    return str(step)


@contextlib.contextmanager
def _staging(path: str) -> Iterator[pathlib.Path]:
    try:
        # Beside the destination, so that the file can be put in its place in one go.
        made = tempfile.mkdtemp(prefix=".tfdist-", dir=pathlib.Path(path).parent)
    except OSError:
        made = tempfile.mkdtemp(prefix="tfdist-")
    try:
        yield pathlib.Path(made)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _publish(staging: pathlib.Path, path: str) -> None:
    for entry in sorted(staging.iterdir()):
        target = file_utils.join(path.rpartition("/")[0] or ".", entry.name)
        if file_utils.is_remote_path(path):
            _copy(entry, target)
        elif entry.is_dir() and pathlib.Path(target).exists():
            shutil.copytree(entry, target, dirs_exist_ok=True)
        else:
            shutil.move(entry, target)


def _copy(entry: pathlib.Path, target: str) -> None:
    """Copies a file or a directory to a remote path."""
    if not entry.is_dir():
        file_utils.copy(str(entry), target)
        return
    file_utils.makedirs(target)
    # Subdirectories come first: with the file of its graph, a SavedModel is complete.
    for each in sorted(entry.iterdir(), key=lambda each: not each.is_dir()):
        _copy(each, file_utils.join(target, each.name))


# Paths that differ between workers.

# The path that the user gave to a callback, while the callback saves in the scratch directory.
_intended: contextvars.ContextVar[str | None] = contextvars.ContextVar("intended", default=None)
_said_apart: list[str] = []


def _names(path: str) -> list[str]:
    """Returns a path as it is written and with its links resolved; machines may have different links."""
    if file_utils.is_remote_path(path):
        return [path, path]
    return [str(pathlib.Path(path).absolute()), str(pathlib.Path(path).resolve())]


def _keep_own(staging: pathlib.Path, path: str, of_chief: list[str]) -> None:
    """Moves what this worker has saved to its own path, if that is another one than the chief's; removes it else."""
    intended = _intended.get()
    path = intended or path
    try:
        if _is_apart(path, of_chief):
            _say_apart(path, of_chief[0])
            if intended and not file_utils.is_remote_path(path):
                # As the callback has done in the scratch directory.
                pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
            _publish(staging, path)
    except OSError as error:
        # The chief's file is there.
        messages.say(f"tfdist: this worker could not save {path}: {error}; {of_chief[0]} is complete")
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _is_apart(path: str, of_chief: list[str]) -> bool:
    if path.startswith(_scratch()) or any(one == other for one, other in zip(_names(path), of_chief, strict=True)):
        return False
    # Neither a device nor a pipe.
    target = pathlib.Path(path)
    return not target.exists() or target.is_file() or target.is_dir()


def _say_apart(path: str, of_chief: str) -> None:
    """Says once in a process that the paths of the workers differ."""
    if _said_apart:
        return
    _said_apart.append(path)
    messages.say(
        f"tfdist: the workers save under different paths, so each writes a file of its own: here {path}, on the chief "
        f"{of_chief}. Save under one path to have the chief alone write"
    )


# Callbacks: on the others, their paths lead to the scratch directory.


def _wrap_checkpoint(original: Callable[..., Any]) -> Callable[..., Any]:
    def save_model(callback: Any, *args: Any, **kwargs: Any) -> Any:
        agreement = _agreement(callback.model)
        calling = agreement.calling("the callback ModelCheckpoint") if agreement else contextlib.nullcontext()
        intended = _intended.set(callback._get_file_path(*args, **kwargs))
        try:
            with calling, _redirected(callback, "filepath"):
                return original(callback, *args, **kwargs)
        finally:
            _intended.reset(intended)

    return save_model


def _wrap_backup(original: Callable[..., Any]) -> Callable[..., Any]:
    def save_model(callback: Any, *args: Any, **kwargs: Any) -> Any:
        with _redirected(callback, *_BACKUP_PATHS):
            return original(callback, *args, **kwargs)

    return save_model


def _wrap_backup_end(original: Callable[..., Any]) -> Callable[..., Any]:
    def on_train_end(callback: Any, logs: Any = None) -> Any:
        agreement = _agreement(callback.model)
        if agreement is None:
            return original(callback, logs)
        return agreement.from_chief(lambda: original(callback, logs), "removing a backup", callback.backup_dir)

    return on_train_end


def _wrap_backup_begin(original: Callable[..., Any]) -> Callable[..., Any]:
    def on_train_begin(callback: Any, logs: Any = None) -> Any:
        model, agreement = callback.model, _agreement(callback.model)
        if agreement is None:
            return original(callback, logs)
        what = "restoring a backup", callback.backup_dir
        # The chief alone would notice no other before the end of training.
        agreement.meet("the callback BackupAndRestore", what[0])
        has_backup = agreement.from_chief(lambda: file_utils.exists(callback._weights_path), *what)
        if has_backup and model.optimizer is not None and not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        saved_attributes.find_out()
        # Only the chief reads, so that all workers continue from the same state, whichever files each of them sees.
        epoch = agreement.from_chief(lambda: (original(callback, logs), model._initial_epoch)[1], *what)
        model._initial_epoch = epoch
        if has_backup:
            model.distribute_strategy.distribution.broadcast(_state(model))
        return None

    return on_train_begin


def _state(model: keras.Model) -> list[Any]:
    """The model's and the optimizer's variables, without what metrics count."""
    counters = {id(variable) for metric in model.metrics for variable in metric.variables}
    variables = [*model.variables, *(model.optimizer.variables if model.optimizer else [])]
    return list({id(v): v for v in variables if id(v) not in counters}.values())


def _wrap_tensorboard(original: Callable[..., Any]) -> Callable[..., Any]:
    def set_model(callback: Any, model: Any) -> Any:
        _redirect(callback, model, "log_dir")
        return original(callback, model)

    return set_model


def _wrap_csv(original: Callable[..., Any]) -> Callable[..., Any]:
    def on_train_begin(callback: Any, logs: Any = None) -> Any:
        _redirect(callback, callback.model, "filename")
        return original(callback, logs)

    return on_train_begin


# The terminal: logs are the same on all workers.


def _wrap_progress(original: Callable[..., Any]) -> Callable[..., Any]:
    def set_params(callback: Any, params: Any) -> Any:
        agreement = _agreement(callback.model)
        is_silent = agreement is not None and not agreement.is_chief and params["verbose"] == "auto"
        return original(callback, {**params, "verbose": 0} if is_silent else params)

    return set_params


@contextlib.contextmanager
def _redirected(callback: Any, *names: str) -> Iterator[None]:
    before = {name: getattr(callback, name) for name in names}
    _redirect(callback, callback.model, *names)
    try:
        yield
    finally:
        for name, path in before.items():
            setattr(callback, name, path)


def _redirect(callback: Any, model: Any, *names: str) -> None:
    agreement = _agreement(model)
    if agreement is None or agreement.is_chief:
        return
    for name in names:
        path = getattr(callback, name)
        if not str(path).startswith(_scratch()):
            setattr(callback, name, _in_scratch(path))


# (owner, name, wrapper, first parameters) of each wrapped function.
_WRAPPED: tuple[tuple[Any, str, Callable[..., Any], tuple[str, ...]], ...] = (
    (saving_lib, "save_model", _wrap_save, ("model", "filepath")),
    (saving_lib, "save_weights_only", _wrap_save, ("model", "filepath")),
    (legacy_h5_format, "save_model_to_hdf5", _wrap_save, ("model", "filepath")),
    (keras.Model, "export", _wrap_save, ("self", "filepath")),
    (keras.callbacks.ModelCheckpoint, "_save_model", _wrap_checkpoint, ("self", "epoch", "batch", "logs")),
    (keras.callbacks.BackupAndRestore, "_save_model", _wrap_backup, ("self",)),
    (keras.callbacks.BackupAndRestore, "on_train_begin", _wrap_backup_begin, ("self", "logs")),
    (keras.callbacks.BackupAndRestore, "on_train_end", _wrap_backup_end, ("self", "logs")),
    (keras.callbacks.TensorBoard, "set_model", _wrap_tensorboard, ("self", "model")),
    (keras.callbacks.ProgbarLogger, "set_params", _wrap_progress, ("self", "params")),
    (keras.callbacks.CSVLogger, "on_train_begin", _wrap_csv, ("self", "logs")),
)
