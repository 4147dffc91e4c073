# SPDX-License-Identifier: Apache-2.0
"""Makes workers wait for a file that they load before the chief has saved it, and say why it never appears.

A chief that saves alone (`if rank == 0: model.save(path)`) is still at it when the others load the file. Where no file
appears, the path is most likely one of a disk that the chief's machine does not share.

There is no public way: a script calls the functions that load by their public names, and Keras has several for one
function. They are replaced for good. TensorFlow's and Keras' layers of SavedModels share a private function.
"""

from __future__ import annotations

import os
import pathlib
import time
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras.src.saving import saving_api
from tensorflow.python.saved_model import loader_impl

from tfdist.compat import replacing
from tfdist.runtime import messages

NEEDS = (
    "keras.src.saving.saving_api:load_model(filepath)",
    "keras:Model.load_weights(filepath)",
    "tensorflow.python.saved_model.loader_impl:parse_saved_model_with_debug_info(export_dir)",
)

# Longest wait for a file.
WAIT_SECS = 10.0


def install(task: str, chief: str) -> None:
    """Makes this process wait for the files that it loads.

    Args:
      task: name of this worker, such as "worker:1".
      chief: name of the worker that writes the files.
    """

    def waiting(is_there: Callable[[str], bool], index: int = 0) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Returns a wrapper of functions that take the path as their argument number `index`, or as `filepath`."""

        def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
            def load(*args: Any, **kwargs: Any) -> Any:
                path = kwargs.get("filepath", args[index] if len(args) > index else None)
                return _loaded(lambda: original(*args, **kwargs), path, is_there, task, chief)

            return load

        return wrap

    for module in (saving_api, keras.saving, keras.models):
        replacing.once(module, "load_model", waiting(os.path.exists))
    replacing.once(keras.Model, "load_weights", waiting(os.path.exists, 1))
    replacing.once(loader_impl, "parse_saved_model_with_debug_info", waiting(tf.saved_model.contains_saved_model))


def _loaded(load: Callable[[], Any], path: Any, is_there: Callable[[str], bool], task: str, chief: str) -> Any:
    is_local = isinstance(path, str | os.PathLike) and "://" not in os.fspath(path)
    if not is_local or _appears(os.fspath(path), is_there, task):
        return load()
    try:
        return load()
    except (OSError, ValueError) as error:
        where = pathlib.Path(path).absolute()
        raise type(error)(
            f"{error}. {task} has waited {WAIT_SECS:g} s for this file. A file that all workers save under one path is "
            f"written by {chief} alone: use a directory that all workers share. Received: {where}"
        ) from None


def _appears(path: str, is_there: Callable[[str], bool], task: str) -> bool:
    """Waits for a file, and returns False if there is none after `WAIT_SECS`."""
    if is_there(path):
        return True
    messages.say(f"tfdist: {task} waits up to {WAIT_SECS:g} s for {path}, which is not there yet")
    deadline = time.monotonic() + WAIT_SECS
    while time.monotonic() < deadline:
        time.sleep(0.05)
        if is_there(path):
            return True
    return False
