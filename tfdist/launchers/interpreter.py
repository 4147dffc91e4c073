# SPDX-License-Identifier: Apache-2.0
"""Runs a module of tfdist in a Python process that imports from the same places as this one. No TensorFlow import.

`python -m` puts the working directory first on `sys.path`: a file `token.py` there would be run in place of the
standard library's, though the user's program never imports from there.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
from collections.abc import Sequence

# Command-line options that change what is imported, or what code does; -I includes -E and -s.
_FLAGS = (
    ("isolated", "-I"),
    ("ignore_environment", "-E"),
    ("no_user_site", "-s"),
    ("no_site", "-S"),
    ("dont_write_bytecode", "-B"),
    ("optimize", "-O"),
    ("bytes_warning", "-b"),
)
# The path comes as JSON, which holds any file name. With -P there is nothing of the working directory until it is set.
_PROGRAM = (
    "import json, runpy, sys; sys.path[:] = json.loads(sys.argv.pop(1)); runpy.run_module({!r}, None, '__main__')"
)
_ROOT = str(pathlib.Path(__file__).resolve().parents[2])


def module_command(module: str, *arguments: str) -> list[str]:
    """What runs a module with the interpreter, the options and the `sys.path` of this process."""
    return [sys.executable, *_options(), "-P", "-c", _PROGRAM.format(module), json.dumps(_path()), *arguments]


def _options() -> list[str]:
    options = [option for name, option in _FLAGS for _ in range(int(getattr(sys.flags, name)))]
    options += [f"-W{option}" for option in sys.warnoptions]
    # "-X name" is True, "-X name=value" is the value. Other implementations than CPython have none of them.
    given = getattr(sys, "_xoptions", {})
    return options + [f"-X{name}" if value is True else f"-X{name}={value}" for name, value in given.items()]


def _path() -> Sequence[str]:
    """The program's own `sys.path`; tfdist itself last, should the program have found it by other means."""
    path = [os.path.abspath(entry) for entry in sys.path if isinstance(entry, str)]  # noqa: PTH100
    return path if _ROOT in path else [*path, _ROOT]
