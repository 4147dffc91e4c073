# SPDX-License-Identifier: Apache-2.0
"""Finds, in syntax trees, where code reaches past the public surface of TensorFlow and Keras.

Found are imports of their private modules, private attributes, attributes that are put on their objects, and frames of
callers. Types are not known here, so an attribute counts as private if its name begins with one underscore and tfdist
itself defines no such name, and an object counts as foreign if it is not `self`, `cls` or a class of the same module.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Collection, Iterable, Iterator

# Modules that their owners don't document.
_PRIVATE_MODULES = ("tensorflow.python", "tensorflow.core", "tensorflow.compiler", "keras.src", "tf_keras")
_FRAME_CALLS = {"sys._getframe", "inspect.currentframe", "inspect.stack"}
_FRAME_ATTRIBUTES = {"f_back", "f_code", "f_locals"}
_SETTERS = {"setattr", "delattr", "object.__setattr__", "object.__delattr__"}
_DICT_WRITERS = {"clear", "pop", "setdefault", "update"}
_OWN_OBJECTS = {"self", "cls"}


def find(tree: ast.Module, own: Collection[str], foreign: Collection[str] = ()) -> Iterator[tuple[int, str]]:
    """Yields (line, source) of each place in a module that reaches past a public surface.

    Args:
      tree: the module.
      own: names with an underscore that tfdist defines, see `defined`.
      foreign: names with an underscore that are known to be attributes of TensorFlow's or Keras' objects; on anything
        but `self` they count even if tfdist defines the same name, too, and so they do as strings.
    """
    classes = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    for node in ast.walk(tree):
        if (
            is_private_import(node)
            or _is_private_attribute(node, own, foreign)
            or (isinstance(node, ast.Constant) and node.value in foreign)
            or _inspects_frame(node)
            or _is_put_on_foreign(node, classes)
        ):
            yield getattr(node, "lineno", 0), ast.unparse(node)


def defined(trees: Iterable[ast.Module]) -> set[str]:
    """The names with an underscore that these modules define: functions, classes, variables, and attributes of self."""
    names: set[str] = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_own(node.value):
            names.add(node.attr)
    return {name for name in names if _is_private(name)}


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _is_own(node: ast.AST, classes: Collection[str] = ()) -> bool:
    return isinstance(node, ast.Name) and (node.id in _OWN_OBJECTS or node.id in classes)


def is_private_import(node: ast.AST) -> bool:
    """Returns True if this imports a module that its owner does not document, or something in one."""
    names: list[str] = []
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and not node.level:
        names = [f"{node.module}.{alias.name}" for alias in node.names]
    return any(f"{name}.".startswith(f"{module}.") for name in names for module in _PRIVATE_MODULES)


def private_attribute(node: ast.AST) -> tuple[ast.expr, str] | None:
    """(owner, name) of an attribute with an underscore, also in `getattr` and `hasattr`; Python's own are left out."""
    if isinstance(node, ast.Attribute):
        owner, name = node.value, node.attr
    elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr") and len(node.args) > 1:
        owner, name = node.args[0], getattr(node.args[1], "value", None)
    else:
        return None
    is_of_python = isinstance(owner, ast.Name) and owner.id in sys.stdlib_module_names
    return (owner, name) if isinstance(name, str) and _is_private(name) and not is_of_python else None


def _is_private_attribute(node: ast.AST, own: Collection[str], foreign: Collection[str]) -> bool:
    found = private_attribute(node)
    if found is None:
        return False
    owner, name = found
    return name not in own or (name in foreign and not _is_own(owner) and not _is_super(owner))


def _is_super(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "super"


def _inspects_frame(node: ast.AST) -> bool:
    if not isinstance(node, ast.Attribute):
        return False
    return node.attr in _FRAME_ATTRIBUTES or ast.unparse(node) in _FRAME_CALLS


def _is_put_on_foreign(node: ast.AST, classes: Collection[str]) -> bool:
    if isinstance(node, ast.Call):
        called = ast.unparse(node.func)
        if called in _SETTERS:
            return bool(node.args) and not _is_own(node.args[0], classes)
        return (
            isinstance(node.func, ast.Attribute)
            and node.func.attr in _DICT_WRITERS
            and _is_dict_of_foreign(node.func.value, classes)
        )
    if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
        return _is_dict_of_foreign(node.value, classes)
    # A strategy's `extended` is TensorFlow's.
    is_stored = isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load)
    return is_stored and getattr(node.value, "attr", getattr(node.value, "id", "")) == "extended"


def _is_dict_of_foreign(node: ast.AST, classes: Collection[str]) -> bool:
    """Returns True if this is `vars(x)` or `x.__dict__` of a foreign x."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "vars" and node.args:
        return not _is_own(node.args[0], classes)
    return isinstance(node, ast.Attribute) and node.attr == "__dict__" and not _is_own(node.value, classes)
