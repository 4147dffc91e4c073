# SPDX-License-Identifier: Apache-2.0
"""Files and progress are written by the chief alone, while every worker runs the same script and the same callbacks.

Keras 3 has no notion of a chief: all workers would write the same files at once. Reading a model's variables may need
all workers, so all of them go through the same saving. The others save into a directory of their own, which is removed.
When a save returns, on any worker, the chief's file is complete. The chief does not wait for other workers, so it may
also save alone, where reading the variables needs no other worker. A worker that saves under another path than the
chief, as in a temporary directory of its own, keeps its file there. With `verbose="auto"`, Keras' default, only the
chief shows a progress bar: all workers have the same logs.

There is no public way: callbacks and models write by functions that none of them takes as an argument. So the functions
in `_WRITERS` are replaced, for good; `Telemetry` listens to their saves, too. Methods of callbacks are replaced on each
one when Keras makes its list of callbacks. Any model but those of a `MultiWorkerMirroredStrategy` on several workers is
saved by stock Keras.
"""

from __future__ import annotations

import contextlib
import contextvars
import fcntl
import functools
import operator
import os
import pathlib
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.legacy.saving import legacy_h5_format
from keras.src.saving import saving_lib
from tensorflow.python.checkpoint import checkpoint
from tensorflow.python.checkpoint import restore as checkpoint_restore
from tensorflow.python.saved_model import save

from tfdist import _forks, _log
from tfdist.compat import patching
from tfdist.compat.keras import calls, layers
from tfdist.compat.tensorflow import graphs, variables

NEEDS = (
    "keras.src.legacy.saving.legacy_h5_format:save_model_to_hdf5(model, filepath)",
    "keras.src.saving.saving_lib:save_model(model, filepath), save_weights_only(model, filepath)",
    "keras:callbacks.BackupAndRestore._save_model, _weights_path",
    "keras:callbacks.ModelCheckpoint._save_model(epoch, batch, logs)",
    "tensorflow.python.saved_model.save:_build_meta_graph(meta_graph_def)",
    "tensorflow.python.checkpoint.checkpoint:TrackableSaver.restore(save_path), save(file_prefix)",
    "tensorflow.python.checkpoint.restore:CheckpointPosition._restore_descendants, _single_restore(self), trackable",
)


# Functions that write the files of a model, given the model and a path; the user's calls that end in them.
_WRITERS = (
    (saving_lib, "save_model", "model.save"),
    (saving_lib, "save_weights_only", "model.save_weights"),
    (legacy_h5_format, "save_model_to_hdf5", "model.save"),
    (keras.Model, "export", "model.export"),
)


def write_by_chief() -> None:
    """Wraps what Keras writes files with, once per process."""
    _wrap_writers()
    calls.before_callbacks(_prepare)


def _agreement(model: Any) -> Any:
    """Returns the `engines.agreement.Agreement` of a model's workers; None if a single process trains it."""
    distribution = getattr(getattr(model, "distribute_strategy", None), "distribution", None)
    return distribution and distribution.agreement


@functools.cache
def _scratch() -> str:
    """Makes a directory for files of this worker that are discarded; removed at the end of the process."""
    path = tempfile.mkdtemp(prefix="tfdist-")
    _forks.at_exit(shutil.rmtree, path, True)
    return path


def _in_scratch(path: Any) -> str:
    return str(pathlib.Path(tempfile.mkdtemp(dir=_scratch())) / pathlib.Path(os.fspath(path)).name)


# Saving: save_model(model, filepath, ...) and its like.


_before = calls.Listeners()


def before_saves(listener: Callable[[Any], None]) -> None:
    """Calls a bound method with the model before each save of this process by Keras, as long as its owner lives."""
    _wrap_writers()
    _before.add(listener)


# Given the strategy of the model, the path, the monotonic time of the begin, and the seconds that the save took.
Listener = Callable[[Any, str, float, float], None]
_listeners = calls.Listeners()


def listen_to_saves(listener: Listener) -> None:
    """Calls a bound method after each save of this process, by Keras or `Resume`, as long as its owner lives."""
    _wrap_writers()
    _listeners.add(listener)


@contextlib.contextmanager
def announced_save(strategy: Any, path: str) -> Iterator[None]:
    """Announces the save that is made within the block, unless the block raises."""
    began = time.monotonic()
    yield
    _listeners.call(strategy, path, began, time.monotonic() - began)


def _wrap_writers() -> None:
    for owner, name, call in _WRITERS:
        patching.once(owner, name, _saving, call)


def _saving(original: Any, call: str, model: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
    def write(path: Any) -> Any:
        return original(model, path, *args, **kwargs)

    agreement = _agreement(model)
    with agreement.calling(call) if agreement else contextlib.nullcontext():
        _before.call(model)
    if not isinstance(filepath, str | os.PathLike):
        return write(filepath)
    path = os.fspath(filepath)
    with announced_save(getattr(model, "distribute_strategy", None), path):
        if agreement is None:
            return write(filepath)
        with agreement.calling(call):
            return _save_together(agreement, model, path, write)


def _save_together(agreement: Any, model: Any, path: str, save: Callable[[str], Any]) -> None:
    # Workers that save under names of their own number them, or have them in directories of their own.
    place, name = _place(model), re.sub(r"[0-9]+", "#", pathlib.PurePath(path).name)

    def write() -> list[str]:
        with _staging(path) as staging:
            save(str(staging / pathlib.Path(path).name))
            _publish(staging, path)
        return _names(path)

    if agreement.is_chief:
        agreement.from_chief_at(place, name, write, f"saving {path}")
        return
    # Of a callback, whose path leads to the scratch directory.
    intended = _intended.get()
    own = intended() if intended else path
    with tempfile.TemporaryDirectory(dir=_scratch(), ignore_cleanup_errors=True) as staging:
        save(str(pathlib.Path(staging, pathlib.Path(path).name)))
        of_chief = agreement.from_chief_at(place, name, write, f"saving {own}")
        if _is_apart(own, of_chief):
            _keep_own(pathlib.Path(staging), own, of_chief[0])


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
        target = tf.io.gfile.join(path.rpartition("/")[0] or ".", entry.name)
        if _is_remote(path):
            _copy(entry, target)
        elif entry.is_dir() and pathlib.Path(target).exists():
            shutil.copytree(entry, target, dirs_exist_ok=True)
        else:
            shutil.move(entry, target)


def _copy(entry: pathlib.Path, target: str) -> None:
    """Copies a file or a directory to a remote path."""
    if not entry.is_dir():
        tf.io.gfile.copy(str(entry), target, overwrite=True)
        return
    tf.io.gfile.makedirs(target)
    # Subdirectories come first: with the file of its graph, a SavedModel is complete.
    for each in sorted(entry.iterdir(), key=lambda each: not each.is_dir()):
        _copy(each, tf.io.gfile.join(target, each.name))


def _is_remote(path: str) -> bool:
    """Returns True for a path of a file system that is not mounted, such as gs://."""
    return "://" in path


# Paths that differ between workers.

# Gives the path that the user gave to a callback, while the callback saves in the scratch directory.
_intended: contextvars.ContextVar[Callable[[], str] | None] = contextvars.ContextVar("intended", default=None)
_said_apart: list[str] = []


def _names(path: str) -> list[str]:
    """Returns a path as it is written and with its links resolved; machines may have different links."""
    if _is_remote(path):
        return [path, path]
    return [str(pathlib.Path(path).absolute()), str(pathlib.Path(path).resolve())]


def _keep_own(staging: pathlib.Path, path: str, of_chief: str) -> None:
    """Moves what this worker has saved to its own path, which is another one than the chief's; says so once."""
    if not _said_apart:
        _said_apart.append(path)
        _log.say(
            f"the workers save under different paths, so each writes a file of its own: here {path}, on the chief "
            f"{of_chief}. Save under one path to have the chief alone write"
        )
    try:
        if _intended.get() and not _is_remote(path):
            # As the callback has done in the scratch directory.
            pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
        _publish(staging, path)
    except OSError as error:
        # The chief's file is there.
        _log.say(f"this worker could not save {path}: {error}; {of_chief} is complete")


def _is_apart(path: str, of_chief: list[str]) -> bool:
    if path.startswith(_scratch()) or any(map(operator.eq, _names(path), of_chief)):
        return False
    # Neither a device nor a pipe.
    target = pathlib.Path(path)
    return not target.exists() or target.is_file() or target.is_dir()


# Callbacks: on the others, their paths lead to the scratch directory.


def _prepare(model: Any, callbacks: Sequence[Any], params: dict[str, Any]) -> None:
    """Makes the callbacks of a call write, and show progress, on the chief alone."""
    agreement = _agreement(model)
    if agreement is None:
        return
    # The terminal: logs are the same on all workers.
    if not agreement.is_chief and params.get("verbose") == "auto":
        params["verbose"] = 0
    for callback in callbacks:
        for kind, attribute in ((keras.callbacks.TensorBoard, "log_dir"), (keras.callbacks.CSVLogger, "filename")):
            if isinstance(callback, kind) and not agreement.is_chief:
                path = getattr(callback, attribute)
                if not str(path).startswith(_scratch()):
                    setattr(callback, attribute, _in_scratch(path))
        # A method of the user's own may do what all workers have to.
        is_posting = getattr(type(callback), "on_epoch_end", None) is keras.callbacks.RemoteMonitor.on_epoch_end
        if is_posting and not agreement.is_chief:
            patching.put_method(callback, "on_epoch_end", lambda *_: None)
        if isinstance(callback, keras.callbacks.ModelCheckpoint):
            patching.put_method(callback, "_save_model", _write_model)
        if isinstance(callback, keras.callbacks.BackupAndRestore):
            patching.put_method(callback, "_save_model", _write_backup)
            patching.put_method(callback, "on_train_begin", _restore_backup)
            patching.put_method(callback, "on_train_end", _remove_backup)


def _write_model(callback: Any, epoch: int, batch: int | None, logs: Any) -> None:
    agreement, path = _agreement(callback.model), callback.filepath
    if agreement is None:
        return type(callback)._save_model(callback, epoch, batch, logs)
    values = {"batch": (batch or 0) + 1, **(logs or {}), "epoch": epoch + 1}
    intended = _intended.set(functools.partial(path.format, **values))
    try:
        if not agreement.is_chief:
            callback.filepath = _in_scratch(path)
        with agreement.calling("the callback ModelCheckpoint"):
            return type(callback)._save_model(callback, epoch, batch, logs)
    finally:
        callback.filepath = path
        _intended.reset(intended)


def _write_backup(callback: Any) -> None:
    agreement = _agreement(callback.model)
    if agreement is None or agreement.is_chief:
        type(callback)._save_model(callback)
    else:
        callback.model.save_weights(_in_scratch(callback._weights_path))


def _remove_backup(callback: Any, logs: Any = None) -> None:
    agreement = _agreement(callback.model)
    remove = functools.partial(type(callback).on_train_end, callback, logs)
    if agreement is None:
        remove()
    else:
        agreement.from_chief(remove, "removing a backup")


def _restore_backup(callback: Any, logs: Any = None) -> None:
    model, agreement = callback.model, _agreement(callback.model)
    load = functools.partial(type(callback).on_train_begin, callback, logs)
    if agreement is None:
        return load()
    what = "restoring a backup"
    # The chief alone would notice no other before the end of training.
    with agreement.calling("the callback BackupAndRestore"):
        agreement.gather(None, what)
    has_backup = agreement.from_chief(lambda: tf.io.gfile.exists(callback._weights_path), what)
    if has_backup and model.optimizer is not None and not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)

    def restore() -> int | None:
        # To load a file, Keras makes an optimizer to compare with: in the scope, its variables need all workers.
        graphs.call_outside(load)
        return calls.first_epoch_of(model)

    # Only the chief reads, so that all workers continue from the same state, whichever files each of them sees.
    calls.begin_with_epoch(model, agreement.from_chief(restore, what))
    if has_backup:
        model.distribute_strategy.distribution.broadcast(_state(model))
    return None


def _state(model: keras.Model) -> list[Any]:
    """The model's and the optimizer's variables, without what metrics count."""
    counters = {id(variable) for variable in model.metrics_variables}
    variables = [*model.variables, *(model.optimizer.variables if model.optimizer else [])]
    return list({id(v): v for v in variables if id(v) not in counters}.values())


# Makes workers wait for a file that they load before the chief has saved it.
#
# A chief that saves alone (`if rank == 0: model.save(path)`) is still at it when the others load the file. A script
# calls the functions that load by their public names, of which Keras has several for one function. They are replaced
# for good. Keras' layers of SavedModels call that of TensorFlow.


# Longest wait for a file.
WAIT_SECS = 10.0


def wait_for_files(task: str) -> None:
    """Makes this process, the worker of this name, wait for the files that it loads."""
    for module in (keras.saving, keras.models):
        patching.once(module, "load_model", _loading, os.path.exists, 0, task)
    patching.once(tf.saved_model, "load", _loading, tf.saved_model.contains_saved_model, 0, task)
    patching.once(keras.Model, "load_weights", _loading, os.path.exists, 1, task)


def _loading(
    original: Any, is_there: Callable[[str], bool], index: int, task: str, /, *args: Any, **kwargs: Any
) -> Any:
    """Waits for the file whose path is the argument number `index`, or has a name."""
    path = args[index] if len(args) > index else kwargs.get("filepath", kwargs.get("export_dir"))
    if isinstance(path, str | os.PathLike) and not _is_remote(os.fspath(path)):
        _wait_for(os.fspath(path), is_there, task)
    return original(*args, **kwargs)


def _wait_for(path: str, is_there: Callable[[str], bool], task: str) -> None:
    if not is_there(path):
        _log.say(f"{task} waits up to {WAIT_SECS:g} s for {path}, which is not there yet")
        deadline = time.monotonic() + WAIT_SECS
        while not is_there(path) and time.monotonic() < deadline:
            time.sleep(0.05)


# Writes SavedModels that load in any process: no task of a cluster in their devices, one variable for each of Keras.
#
# TensorFlow writes the device of a lookup table, and the task of each variable, into the functions that save and
# restore them. Another task, or another cluster, can't load such a SavedModel. There is no public way: the graph is
# made by a private function that `tf.saved_model.save` and `model.export` share. `clear_tasks` changes it for good.


_TASK = re.compile(r"/(job|replica|task):[^/]*")


def clear_tasks() -> None:
    """Writes SavedModels without names of tasks; devices of a task, such as "/device:GPU:0", are kept."""
    patching.once(save, "_build_meta_graph", _clearing)


def _clearing(original: Any, *args: Any, **kwargs: Any) -> Any:
    built = original(*args, **kwargs)
    clear_tasks_of(built[0])
    return built


def clear_tasks_of(meta_graph: Any) -> None:
    """Removes job, replica and task from all devices in a MetaGraphDef."""
    graph = meta_graph.graph_def
    for nodes in (graph.node, *(function.node_def for function in graph.library.function)):
        for node in nodes:
            node.device = _TASK.sub("", node.device)
            # Calls of functions hold the configuration of the process: its device filters, and the collectives' leader.
            if "config_proto" in node.attr:
                node.attr["config_proto"].s = _without_cluster(node.attr["config_proto"].s)
    for saved in meta_graph.object_graph_def.nodes:
        # Writing an attribute of a part of a protocol buffer that is not set would set it.
        for kind in ("resource", "variable"):
            if saved.HasField(kind):
                part = getattr(saved, kind)
                part.device = _TASK.sub("", part.device)


def _without_cluster(serialized: bytes) -> bytes:
    config = tf.compat.v1.ConfigProto.FromString(serialized)
    for name in ("device_filters", "cluster_def"):
        config.ClearField(name)
    for name in ("collective_group_leader", "coordination_config"):
        config.experimental.ClearField(name)
    return config.SerializeToString(deterministic=True)


# Lets several workers write one `tf.train.Checkpoint` to one directory at once.
#
# TensorFlow's workers write parts of the same names there, of which one removes the other's. All ways to save a
# checkpoint meet in a private class; there is no public one that `tf.train.CheckpointManager` goes through.
#
# A checkpoint is two files, an index and the values that it has the checksums of; no file system replaces two at once.
# Each worker writes them under names of its own and puts them in their places while it holds a lock of the directory.
# Restoring takes the lock too, so that no worker reads the index of one save with the values of another: the files of
# workers that have the same values differ by the names of layers if the workers made different models before.


# Another worker holds the lock while it renames two files or reads a checkpoint. A restore that waits for the other
# workers would never let them save, so no worker waits longer than this.
LOCK_SECS = 30.0


def share_checkpoints(task: str) -> None:
    """Makes this process write each checkpoint under another name, and rename it once it is whole.

    Args:
      task: name of this worker, such as "worker:1".
    """
    patching.once(checkpoint.TrackableSaver, "save", _saving_checkpoint, task)
    patching.once(checkpoint.TrackableSaver, "restore", _restoring_checkpoint)


def _saving_checkpoint(original: Any, task: str, saver: Any, file_prefix: Any, *args: Any, **kwargs: Any) -> Any:
    if not tf.executing_eagerly() or not isinstance(file_prefix, str | os.PathLike):
        return original(saver, file_prefix, *args, **kwargs)
    prefix = os.fspath(file_prefix)
    staged = f"{prefix}.of-{task.replace(':', '-')}"
    written = original(saver, staged, *args, **kwargs)
    written = written.numpy().decode() if isinstance(written, tf.Tensor) else os.fspath(written)
    # A number may have been added.
    target = prefix + written[len(staged) :]
    with locked(target, fcntl.LOCK_EX):
        publish_checkpoint(written, target)
    return tf.constant(target)


def _restoring_checkpoint(original: Any, saver: Any, save_path: Any, *args: Any, **kwargs: Any) -> Any:
    is_path = isinstance(save_path, str | os.PathLike)
    with locked(os.fspath(save_path), fcntl.LOCK_SH) if is_path else contextlib.nullcontext():
        return original(saver, save_path, *args, **kwargs)


def publish_checkpoint(written: str, target: str) -> None:
    """Moves a complete checkpoint to its destination."""
    # The index comes last: with it the checkpoint is complete.
    for path in sorted(tf.io.gfile.glob(f"{written}.*"), key=lambda path: path.endswith(".index")):
        tf.io.gfile.rename(path, target + path[len(written) :], overwrite=True)


@contextlib.contextmanager
def locked(prefix: str, kind: int) -> Iterator[None]:
    """Holds the lock of the directory with this checkpoint, where its file system has such locks."""
    try:
        directory = os.open(prefix.rpartition("/")[0] or ".", os.O_RDONLY)
    except OSError:
        # Not on a mounted file system, as gs://.
        yield
        return
    deadline = time.monotonic() + LOCK_SECS
    try:
        # Some network file systems have no locks of directories.
        with contextlib.suppress(OSError):
            while time.monotonic() < deadline:
                try:
                    fcntl.flock(directory, kind | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(0.01)
        yield
    finally:
        # Closing lets go of it.
        os.close(directory)


# Restores a checkpoint into variables that Keras has declared, and creates later.
#
# `tf.train.Checkpoint(model=model).restore(path)` before the model is built restores each variable as soon as a layer
# tracks it. On one device the variable exists by then. Under a strategy Keras declares variables in a
# `keras.StatelessScope`, which creates them when it ends: TensorFlow raises while it restores a variable without a
# value, and the checkpoint's value is lost. So the restore waits until the variable has been created. There is no
# public seam at either moment.


# An attribute of Keras variables: the positions in checkpoints that are yet to be restored into it, in their order.
_WAITING = "_tfdist_waiting_restores"


def wait_for_variables() -> None:
    """Makes restores wait for the variables that Keras has declared. The replaced methods stay replaced."""
    patching.once(checkpoint_restore.CheckpointPosition, "_single_restore", _restoring)


def _restoring(original: Any, self: Any) -> Any:
    variable = self.trackable
    if not isinstance(variable, keras.Variable) or variables.tf_variable(variable) is not None:
        return original(self)
    waiting = patching.get(variable, _WAITING)
    if waiting is None:
        patching.put(variable, _WAITING, waiting := [])
        layers.around_deferred(variable, contextlib.nullcontext, functools.partial(_restore_waiting, variable))
    waiting.append(self)
    # Restore operations, tensors, Python state and registered savers.
    return (), {}, (), {}


def _restore_waiting(variable: keras.Variable) -> None:
    waiting = patching.get(variable, _WAITING)
    patching.remove(variable, _WAITING)
    with tf.init_scope():
        for position in waiting:
            position._restore_descendants()
