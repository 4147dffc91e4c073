# SPDX-License-Identifier: Apache-2.0
"""Checks, before anything trains, that TensorFlow and Keras have the private names that tfdist needs.

Each module of `tfdist.compat` lists in `NEEDS` the names that it uses below their public surface:

    "package.module:name"                   something in a module
    "package.module:Class.attribute"        an attribute; one that objects get is found in the code of the class
    "package.module:function(one, other)"   arguments or local variables of a function
    "package.module:Class.one, other"       several of a class, or of a module

The lists are read from the source: a module that imports a missing name can't be imported.
"""

from __future__ import annotations

import ast
import dataclasses
import dis
import functools
import importlib
import importlib.metadata
import inspect
import pathlib
import re
from types import CodeType
from typing import Any

# As setup.py has them; a test compares.
ADMITTED = {"tensorflow": ">=2.20,<2.22", "keras": ">=3.15,<3.17"}


@functools.cache
def check() -> None:
    """Does nothing from the second time on.

    Raises:
      RuntimeError: the installed versions lack a name.
    """
    needs = dict.fromkeys(need for of_module in all_needs().values() for need in of_module)
    missing = [need for need in needs if not has(need)]
    if missing:
        admitted = ", ".join(name + bounds for name, bounds in ADMITTED.items())
        received = ", ".join(f"{name} {_version(name)}" for name in ADMITTED)
        raise RuntimeError(
            f"tfdist needs what the installed TensorFlow or Keras does not have: {', '.join(missing)}; install other "
            f"versions ({admitted}) or a newer tfdist. Received: {received}"
        )


@functools.cache
def all_needs() -> dict[str, tuple[str, ...]]:
    """The `NEEDS` of each module of `tfdist.compat` that has any, by the module's name, such as "keras.calls"."""
    found: dict[str, tuple[str, ...]] = {}
    folder = pathlib.Path(__file__).parent
    for path in sorted(folder.rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "NEEDS":
                needs = tuple(need for entry in ast.literal_eval(node.value) for need in _each(entry))
                found[".".join(path.relative_to(folder).with_suffix("").parts)] = needs
    return found


def _each(entry: str) -> list[str]:
    names = entry.rpartition("(")[0] or entry
    owner = names[: max(names.rfind(":"), names.rfind(".")) + 1]
    # Not at the commas between arguments.
    return [owner + name for name in re.split(r", (?![^(]*\))", entry.removeprefix(owner))]


def has(need: str) -> bool:
    """Returns True if the installed TensorFlow and Keras have a name of `NEEDS`."""
    module, _, rest = need.partition(":")
    path, _, variables = rest.rstrip(")").partition("(")
    try:
        found: Any = importlib.import_module(module)
    except ImportError:
        return False
    for name in path.split("."):
        if not hasattr(found, name):
            return isinstance(found, type) and _is_set_by_code(found, name)
        found = getattr(found, name)
    wanted = {each.strip() for each in variables.split(",")} if variables else set()
    return not wanted or wanted <= set(inspect.unwrap(found).__code__.co_varnames)


def _is_set_by_code(kind: type, name: str) -> bool:
    """Returns True if a method of a class, or of one of its bases, sets this attribute, or it is a dataclass' field."""
    if any(field.name == name for field in (dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ())):
        return True
    members = [inspect.unwrap(member) for base in kind.__mro__ for member in vars(base).values()]
    codes = [code for member in members if isinstance(code := getattr(member, "__code__", None), CodeType)]
    instructions = [each for code in codes if name in code.co_names for each in dis.get_instructions(code)]
    return any(each.opname == "STORE_ATTR" and each.argval == name for each in instructions)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
