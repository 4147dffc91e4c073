# SPDX-License-Identifier: Apache-2.0
"""Runs a module of tfdist in a Python process that imports from the same places as this one. No TensorFlow import.

`python -m` puts the working directory first on `sys.path`: a file `token.py` there would replace the standard library's
module, even if the user's program never imports from there.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
from collections.abc import Sequence

# Command-line options that change imports or the behaviour of code; -I includes -E and -s.
_FLAGS = (
    ("isolated", "-I"),
    ("ignore_environment", "-E"),
    ("no_user_site", "-s"),
    ("no_site", "-S"),
    ("dont_write_bytecode", "-B"),
    ("optimize", "-O"),
    ("bytes_warning", "-b"),
)
# The path is passed as JSON, which can hold any file name. -P keeps the working directory off `sys.path` until then.
_PROGRAM = (
    "import json, runpy, sys; sys.path[:] = json.loads(sys.argv.pop(1)); runpy.run_module({!r}, None, '__main__')"
)
_ROOT = str(pathlib.Path(__file__).resolve().parents[2])


def module_command(module: str, *arguments: str) -> list[str]:
    """Returns the command that runs a module with the interpreter, the options and the `sys.path` of this process."""
    return [sys.executable, *_options(), "-P", "-c", _PROGRAM.format(module), json.dumps(_path()), *arguments]


def _options() -> list[str]:
    options = [option for name, option in _FLAGS for _ in range(int(getattr(sys.flags, name)))]
    options += [f"-W{option}" for option in sys.warnoptions]
    # "-X name" is True, "-X name=value" is the value. Only CPython has `_xoptions`.
    given = getattr(sys, "_xoptions", {})
    return options + [f"-X{name}" if value is True else f"-X{name}={value}" for name, value in given.items()]


def _path() -> Sequence[str]:
    """Returns the program's `sys.path`, with tfdist's folder last if the program has found tfdist by other means."""
    path = [os.path.abspath(entry) for entry in sys.path if isinstance(entry, str)]  # noqa: PTH100
    return path if _ROOT in path else [*path, _ROOT]
