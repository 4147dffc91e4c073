# SPDX-License-Identifier: Apache-2.0
"""Files of an update log on an object store, by `tf.io.gfile`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import tensorflow as tf

from tfdist.update_log import Files, LocalFiles


class GFiles:
    """Files of an object store, where a file appears when it is complete. See `update_log.Files`."""

    def read(self, path: str, offset: int = 0) -> bytes:
        """Returns the content of a file from an offset on."""
        with _os_errors(), tf.io.gfile.GFile(path, "rb") as file:
            file.seek(offset)
            return file.read()

    def write(self, path: str, data: bytes) -> None:
        """Writes a file, which appears whole or not at all."""
        with _os_errors(), tf.io.gfile.GFile(path, "wb") as file:
            file.write(data)

    def entries(self, directory: str) -> tuple[list[str], list[str]]:
        """Returns the names of the subdirectories and of the files in a directory; none if it doesn't exist."""
        with _os_errors():
            try:
                names = sorted(tf.io.gfile.listdir(directory))
            except tf.errors.NotFoundError:
                return [], []
            # Object stores mark directories by a slash.
            marked = {name for name in names if name.endswith("/") or tf.io.gfile.isdir(f"{directory}/{name}")}
        return [name.rstrip("/") for name in names if name in marked], [name for name in names if name not in marked]

    def remove(self, path: str) -> None:
        """Removes a file; no error if it doesn't exist."""
        with _os_errors(), contextlib.suppress(tf.errors.NotFoundError):
            tf.io.gfile.remove(path)

    def claim_directory(self, path: str) -> bool:
        """Makes a directory and its parents; returns False if it has files. An object store can't do both at once."""
        if self.entries(path)[1]:
            return False
        with _os_errors():
            tf.io.gfile.makedirs(path)
        return True


def files_of(path: str) -> Files:
    """Returns the file system of a path."""
    return GFiles() if "://" in path else LocalFiles()


@contextlib.contextmanager
def _os_errors() -> Iterator[None]:
    try:
        yield
    except tf.errors.OpError as error:
        raise OSError(f"{type(error).__name__}: {error.message}") from error
