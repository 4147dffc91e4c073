# SPDX-License-Identifier: Apache-2.0
"""Access to files for the update log: the protocol `Files`, and its implementation for local disks."""

from __future__ import annotations

import os
import pathlib
from typing import Protocol

from tfdist import _whole_files


class Files(Protocol):
    """File system that holds logs: a local disk, an object store through `tf.io.gfile`, or TensorBoard's own access.

    Paths are strings whose parts are joined by "/". Errors are `OSError`.
    """

    def read(self, path: str, offset: int = 0) -> bytes:
        """Returns the content of a file from an offset on."""
        ...

    def write(self, path: str, data: bytes) -> None:
        """Writes a file so that no reader ever sees a part of it."""
        ...

    def entries(self, directory: str) -> tuple[list[str], list[str]]:
        """Returns the names of the subdirectories and of the files in a directory; none if it doesn't exist."""
        ...

    def remove(self, path: str) -> None:
        """Removes a file; no error if it doesn't exist."""
        ...

    def claim_directory(self, path: str) -> bool:
        """Makes a directory and its parents; returns False if another writer has it."""
        ...


class LocalFiles:
    """Files of a local disk. Links to directories are not followed, so that nothing outside is read."""

    def read(self, path: str, offset: int = 0) -> bytes:
        """Returns the content of a file from an offset on."""
        with pathlib.Path(path).open("rb") as file:
            file.seek(offset)
            return file.read()

    def write(self, path: str, data: bytes) -> None:
        """Writes a file under another name and renames it."""
        _whole_files.write(path, data, permissions=0o644)

    def entries(self, directory: str) -> tuple[list[str], list[str]]:
        """Returns the names of the subdirectories and of the files in a directory; none if it doesn't exist."""
        directories, files = [], []
        try:
            with os.scandir(directory) as found:
                for entry in found:
                    if entry.is_dir(follow_symlinks=False):
                        directories.append(entry.name)
                    elif entry.is_file(follow_symlinks=False):
                        files.append(entry.name)
        except (FileNotFoundError, NotADirectoryError):
            pass
        return sorted(directories), sorted(files)

    def remove(self, path: str) -> None:
        """Removes a file; no error if it doesn't exist."""
        pathlib.Path(path).unlink(missing_ok=True)

    def claim_directory(self, path: str) -> bool:
        """Makes a directory and its parents; returns False if it exists, because making it is the claim."""
        try:
            pathlib.Path(path).mkdir(parents=True)
        except FileExistsError:
            return False
        return True
