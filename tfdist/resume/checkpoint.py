# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in a directory, each of them whole or not there at all.

A checkpoint is a folder `step-<number>` with `state.json`, which says what it is of, and `variables.npz`. It is written
under another name, brought to the disk, and renamed; so whatever ends the process, the newest one that was complete is
still there. No TensorFlow.
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

_NAME = re.compile(r"step-(\d{10,})")
_WRITING = ".writing-"
_UNREADABLE = "unreadable-"
_OLD = ".old-"
_STATE, _VARIABLES = "state.json", "variables.npz"
# What reading a damaged file raises; not what a file system raises that is away for a while.
_DAMAGES = (ValueError, KeyError, TypeError, EOFError, NotImplementedError, zipfile.BadZipFile, zlib.error)


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """What was saved.

    Attributes:
      step: how many training steps had been made.
      state: JSON data.
      arrays: the values of the variables, in the order in which they were given.
    """

    step: int
    state: dict[str, Any]
    arrays: tuple[np.ndarray, ...]


class CheckpointDirectory:
    """The checkpoints of one training. One process writes, any may read.

    Args:
      path: the directory; it is made when something is saved.
      max_to_keep: how many checkpoints are kept, the newest ones.
      say: takes a line for the person who watches the run.
    """

    def __init__(self, path: str | os.PathLike[str], max_to_keep: int, say: Callable[[str], object]) -> None:
        self._path = pathlib.Path(path)
        self._max_to_keep = max_to_keep
        self._say = say

    def save(self, checkpoint: Checkpoint) -> None:
        """Writes a checkpoint; one of the same step is replaced.

        Raises:
          OSError: it can't be written.
        """
        self._path.mkdir(parents=True, exist_ok=True)
        # Of a process that was killed while it wrote.
        for left in [*self._path.glob(f"{_WRITING}*"), *self._path.glob(f"{_OLD}*")]:
            shutil.rmtree(left, ignore_errors=True)
        name = f"step-{checkpoint.step:010d}"
        unfinished = self._path / f"{_WRITING}{name}"
        unfinished.mkdir()
        with (unfinished / _VARIABLES).open("wb") as file:
            # Allowed to have any number of arrays, and none.
            np.savez(file, allow_pickle=False, **{str(index): array for index, array in enumerate(checkpoint.arrays)})
            _sync(file.fileno())
        with (unfinished / _STATE).open("w", encoding="utf-8") as file:
            json.dump({"step": checkpoint.step, "arrays": len(checkpoint.arrays), "state": checkpoint.state}, file)
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
        """The newest checkpoint that can be read, or None. One that can't be read is put aside, and that is said.

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
        """The folders of checkpoints, the newest first."""
        if not self._path.exists():
            return []
        steps = {int(match[1]): path for path in self._path.iterdir() if (match := _NAME.fullmatch(path.name))}
        return [steps[step] for step in sorted(steps, reverse=True)]


def check_same(saved: Sequence[Sequence[Any]], found: Sequence[Sequence[Any]], path: str | os.PathLike[str]) -> None:
    """Checks that a checkpoint is one of this model.

    Args:
      saved: (name, shape, dtype) of each variable in the checkpoint.
      found: the same of the model's. Names may differ: Keras numbers them through a process.
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
    with np.load(folder / _VARIABLES, allow_pickle=False) as arrays:
        return Checkpoint(found["step"], found["state"], tuple(arrays[str(i)] for i in range(found["arrays"])))


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
