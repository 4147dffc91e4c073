# SPDX-License-Identifier: Apache-2.0
"""Writes a file whole or not at all: under another name in its directory, which it loses at the end."""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import re
import secrets
import sys
from collections.abc import Iterator
from typing import IO

# By a descriptor of this process: opened anew, a file would be emptied.
_OPENED = re.compile(r"/dev/(?:fd/([0-9]+)|std([oe])(?:ut|rr))")


@contextlib.contextmanager
def opened(path: str | os.PathLike[str], permissions: int | None = None) -> Iterator[IO[bytes]]:
    """Opens a file for writing, which appears under its name at the end of the block; after an error nothing is left.

    Args:
      path: name of the file; its directory exists. A file of this name, or that a link leads to, is replaced. What is
        no file, such as a pipe, is written at once; /dev/stdout and the like as they were opened.
      permissions: mode bits of the file, such as 0o644; by default those that the umask leaves to a new file.

    Raises:
      OSError: the file can't be written; it names `path`.
    """
    target = pathlib.Path(path)
    if (of_process := _OPENED.fullmatch(str(target))) or _is_no_file(target):
        sys.stdout.flush()
        place = os.dup(int(of_process[1] or ".oe".index(of_process[2]))) if of_process else target
        with open(place, "wb") as file:  # noqa: PTH123 - a descriptor
            yield file
        return
    target = pathlib.Path(os.path.realpath(target))
    part = target.with_name(f".{secrets.token_hex(8)}.part")
    try:
        with part.open("xb") as file:
            if permissions is not None:
                part.chmod(permissions)
            yield file
        part.replace(target)
    except BaseException as error:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename == str(part):
            # The temporary name says nothing to who gave the other one.
            raise type(error)(error.errno, error.strerror, str(path)) from None
        raise


def check_writable(path: str | os.PathLike[str], argument: str) -> None:
    """Checks that `opened` can write a file, before the work whose result it is for.

    Raises:
      OSError: it can't; the message names the argument.
    """
    try:
        if pathlib.Path(path).is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        # Who reads a pipe would take that it is closed for its end.
        if not (_is_no_file(pathlib.Path(path)) and os.access(path, os.W_OK)):
            with contextlib.suppress(_NothingWrittenError), opened(path):
                raise _NothingWrittenError
    except OSError as error:
        raise OSError(
            f"{argument}: the file can't be written ({error.strerror}); give one in a folder that exists and that you "
            f"may write to. Received: {argument}={path}"
        ) from None


def _is_no_file(path: pathlib.Path) -> bool:
    return path.exists() and not path.is_file() and not path.is_dir()


class _NothingWrittenError(Exception):
    pass


def write(path: str | os.PathLike[str], content: str | bytes, permissions: int | None = None) -> None:
    """Writes a file, a text in UTF-8; see `opened`."""
    with opened(path, permissions) as file:
        file.write(content.encode() if isinstance(content, str) else content)
