# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in a directory, written atomically.

A checkpoint is a folder `step-<number>` with `variables.npz` and `state.json`, which describes the variables. It is
written under another name, flushed to disk, and renamed. So the newest complete checkpoint survives a crash at any
time. No TensorFlow import.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import shutil
import zipfile
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tfdist.resume import array_files
from tfdist.resume.array_files import Rows

_NAME = re.compile(r"step-(\d{10,})")
_WRITING = ".writing-"
_UNREADABLE = "unreadable-"
_OLD = ".old-"
_STATE, _VARIABLES = "state.json", "variables.npz"
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
    arrays: tuple[np.ndarray | Rows, ...]


class CheckpointDirectory:
    """The checkpoints of one training. One process writes, any process may read.

    Args:
      path: the directory; created by the first `save`.
      max_to_keep: number of checkpoints that are kept, the newest ones.
      say: writes a line to the log.
    """

    def __init__(self, path: str | os.PathLike[str], max_to_keep: int, say: Callable[[str], object]) -> None:
        self._path = pathlib.Path(path)
        self._max_to_keep = max_to_keep
        self._say = say

    def save(self, checkpoint: Checkpoint) -> None:
        """Writes a checkpoint; replaces one of the same step.

        Raises:
          OSError: the directory can't be written.
        """
        self._path.mkdir(parents=True, exist_ok=True)
        # Remains of a process that was killed while it wrote.
        for left in [*self._path.glob(f"{_WRITING}*"), *self._path.glob(f"{_OLD}*")]:
            shutil.rmtree(left, ignore_errors=True)
        name = f"step-{checkpoint.step:010d}"
        unfinished = self._path / f"{_WRITING}{name}"
        unfinished.mkdir()
        with (unfinished / _VARIABLES).open("wb") as file:
            array_files.write(file, checkpoint.arrays)
            _sync(file.fileno())
        with (unfinished / _STATE).open("w", encoding="utf-8") as file:
            by_rows = [index for index, array in enumerate(checkpoint.arrays) if isinstance(array, Rows)]
            counts = {"step": checkpoint.step, "arrays": len(checkpoint.arrays), "by_rows": by_rows}
            json.dump({**counts, "state": checkpoint.state}, file)
            file.flush()
            _sync(file.fileno())
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
                return _read(folder)
            except (FileNotFoundError, *_DAMAGES) as error:
                self._say(f"{folder} can't be read, and is put aside: {type(error).__name__}: {error}")
                with contextlib.suppress(OSError):
                    folder.rename(folder.with_name(_UNREADABLE + folder.name))
        return None

    def _found(self) -> list[pathlib.Path]:
        """Returns the folders of checkpoints, the newest first."""
        if not self._path.exists():
            return []
        steps = {int(match[1]): path for path in self._path.iterdir() if (match := _NAME.fullmatch(path.name))}
        return [steps[step] for step in sorted(steps, reverse=True)]


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
    remedy = "to train it from the start give Resume another directory, or an empty one"
    if len(saved) != len(found):
        raise ValueError(
            f"Resume(directory): {path} has a checkpoint of another model or optimizer, with {len(saved)} variables; "
            f"{remedy}. Received: {len(found)} variables"
        )
    for (saved_name, *saved_kind), (name, *kind) in zip(saved, found, strict=True):
        if list(saved_kind) != list(kind):
            raise ValueError(
                f"Resume(directory): {path} has a checkpoint of another model: {saved_name} is {_kind(saved_kind)} "
                f"there; {remedy}. Received: {name}, {_kind(kind)}"
            )


def _kind(kind: Sequence[Any]) -> str:
    shape, dtype = kind
    return f"{dtype}{list(shape)}"


def _read(folder: pathlib.Path) -> Checkpoint:
    found = json.loads((folder / _STATE).read_text(encoding="utf-8"))
    # Checkpoints of tfdist 0.1 don't have "by_rows".
    arrays = array_files.read(folder / _VARIABLES, found["arrays"], found.get("by_rows", ()))
    return Checkpoint(found["step"], found["state"], arrays)


def _sync(descriptor: int) -> None:
    os.fsync(descriptor)


def _sync_directory(path: pathlib.Path) -> None:
    # Not every file system lets a directory be opened, or synchronised.
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            _sync(descriptor)
        finally:
            os.close(descriptor)
