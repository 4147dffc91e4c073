# SPDX-License-Identifier: Apache-2.0
"""Converts a notebook or script that somebody else wrote into a program that trains under a given strategy.

Three changes are made, all on the syntax tree: strategies that the program builds become `__strategy__(...)`, epochs,
private paths and downloaded weights are cut, and in a program without a strategy the lines that make models, optimizers
and metrics and those that compile are put under `with __strategy__().scope():`. Nothing else is changed.
"""

from __future__ import annotations

import ast
import json
import pathlib
import re
from collections.abc import Mapping

import options

_STRATEGIES = ("MirroredStrategy", "MultiWorkerMirroredStrategy", "ParameterServerStrategy", "CentralStorageStrategy")
# Attributes of `keras` under which everything may make variables, and what makes them wherever it is found.
_MAKERS = ("layers", "optimizers", "metrics", "applications", "losses")
_MODELS = ("Sequential", "Model", "Input", "clone_model", "compile", "get_layer")
_LOOPS = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch", "run")
_MAX_EPOCHS = 2


def convert(
    path: pathlib.Path, given: options.Options, changes: Mapping[str, str] | None = None
) -> tuple[str, dict[str, str]]:
    """Returns the program's source, and the modules that its notebook writes, by file name.

    Args:
      path: the notebook or script.
      given: its options.
      changes: new texts by the old ones, see keras3.toml.

    Raises:
      SyntaxError: The program is none, or has nothing of an old text.
    """
    text, modules = path.read_text(), {}
    if path.suffix == ".ipynb":
        text, modules = _code_of(text)
    for old, new in (changes or {}).items():
        if old not in text:
            raise SyntaxError(f"{path.name} has no {old!r}, which keras3.toml replaces")
        text = text.replace(old, new)
    if given.main:
        text = modules.pop(given.main)
    converted = {name: _converted(source, given.values, scoped=False) for name, source in modules.items()}
    return _converted(text, given.values, scoped=not given.in_scope), converted


def _converted(text: str, values: Mapping[str, int], scoped: bool = True) -> str:
    tree = ast.parse(text)
    has_strategy = any(isinstance(node, ast.Attribute) and node.attr in _STRATEGIES for node in ast.walk(tree))
    tree = _ShorterLoops().visit(_Shortened(values).visit(tree))
    if scoped and not has_strategy:
        tree.body = _Scopes(tree).under_scope(tree.body)
    return ast.unparse(ast.fix_missing_locations(tree))


def _code_of(notebook: str) -> tuple[str, dict[str, str]]:
    cells, modules = [], {}
    for cell in json.loads(notebook)["cells"]:
        source = "".join(cell["source"])
        written = re.match(r"%%writefile (\S+)\n", source)
        if cell["cell_type"] != "code" or (source.startswith("%%") and not written):
            continue
        if written:
            modules[written[1]] = source[written.end() :]
        else:
            # The magic of a notebook and its commands; an empty block would not parse.
            cells.append(re.sub(r"(?m)^(\s*)[!%].*$", r"\1pass", source))
    return "\n".join(cells), modules


class _Shortened(ast.NodeTransformer):
    """Replaces strategies and names of Keras 2 and NumPy 1, and cuts epochs and downloads."""

    def __init__(self, values: Mapping[str, int]) -> None:
        self._values = values

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        if node.attr == "Inf":
            node.attr = "inf"  # NumPy 2's name
        is_legacy = isinstance(node.value, ast.Attribute) and node.value.attr == "legacy"
        return ast.copy_location(ast.Attribute(node.value.value, node.attr, node.ctx), node) if is_legacy else node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "reset_states":
            node.func.attr = "reset_state"  # Keras 3's name
        if isinstance(node.func, ast.Attribute) and node.func.attr in _STRATEGIES:
            node.func = ast.copy_location(ast.Name("__strategy__", ast.Load()), node.func)
            return node
        is_of_weights = any(keyword.arg == "save_weights_only" for keyword in node.keywords)
        for keyword in node.keywords:
            if _name(node.func) == "ModelCheckpoint" and keyword.arg == "filepath" and not is_of_weights:
                keyword.value = _with_suffix(keyword.value)
            elif keyword.arg in self._values:
                keyword.value = ast.Constant(self._values[keyword.arg])
            elif keyword.arg == "epochs":
                keyword.value = _shorter(keyword.value)
            elif keyword.arg == "weights" and getattr(keyword.value, "value", None) == "imagenet":
                keyword.value = ast.Constant(None)
        return node

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        self.generic_visit(node)
        names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        cut = [self._values[name] for name in names if name in self._values]
        if cut:
            node.value = ast.Constant(cut[0])
        elif any(re.search(r"(^|_)epochs$", name, re.IGNORECASE) for name in names):
            node.value = _shorter(node.value)
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        # A file in the directory of the program's author.
        is_private = isinstance(node.value, str) and re.fullmatch(r"/Users/\S+", node.value)
        value = node.value.rsplit("/", 1)[1] if is_private else self._values.get(repr(node.value), node.value)
        return ast.copy_location(ast.Constant(value), node)

    def visit_arguments(self, node: ast.arguments) -> ast.AST:
        self.generic_visit(node)
        for argument, index in zip(reversed(node.args), reversed(range(len(node.defaults))), strict=False):
            if argument.arg in self._values:
                node.defaults[index] = ast.Constant(self._values[argument.arg])
        return node


class _ShorterLoops(ast.NodeTransformer):
    """Ends loops over data sets outside of functions early."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return node

    def visit_For(self, node: ast.For) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.iter, ast.Call) and _name(node.iter.func) == "enumerate":
            node.iter.args[0] = _some(node.iter.args[0])
        else:
            node.iter = _some(node.iter)
        return node


def _some(data: ast.expr) -> ast.expr:
    return ast.Call(ast.Name("__some__", ast.Load()), [data], [])


def _name(func: ast.expr) -> str:
    return getattr(func, "attr", getattr(func, "id", ""))


def _with_suffix(path: ast.expr) -> ast.expr:
    """The path that Keras 3 asks for."""
    source = ast.unparse(path)
    return ast.parse(f"({source}).removesuffix('.keras') + '.keras'", mode="eval").body


def _shorter(value: ast.expr) -> ast.expr:
    number = getattr(value, "value", None)
    return ast.Constant(min(number, _MAX_EPOCHS)) if isinstance(number, int) else value


class _Scopes:
    """Finds the statements that make what a strategy must know of."""

    def __init__(self, tree: ast.Module) -> None:
        self._imported = {
            alias.asname or alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("keras", "tensorflow")
            for alias in node.names
        }
        definitions = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef | ast.FunctionDef)]
        self._own: set[str] = set()
        self._made: set[str] = set()
        # A function that calls one that makes a model makes one.
        for _ in definitions:
            found = {each.name for each in definitions if self._is_maker(each)}
            if found == self._own:
                break
            self._own = found

    def _is_maker(self, node: ast.ClassDef | ast.FunctionDef) -> bool:
        if isinstance(node, ast.ClassDef):
            return any(self._makes_by_name(base) for base in node.bases)
        return self._makes(node) and not _loops(node)

    def under_scope(self, body: list[ast.stmt]) -> list[ast.stmt]:
        """The same statements, some of them under the scope."""
        done: list[ast.stmt] = []
        for statement in body:
            is_function = isinstance(statement, ast.FunctionDef) and self._makes(statement)
            if (is_function or isinstance(statement, ast.If | ast.For | ast.While | ast.With)) and _loops(statement):
                vars(statement)["body"] = self.under_scope(vars(statement)["body"])
            is_definition = isinstance(statement, ast.FunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom)
            if is_definition or _loops(statement) or not self._makes(statement):
                done.append(statement)
            elif done and getattr(done[-1], "is_scope", False):
                vars(done[-1])["body"].append(statement)
            else:
                done.append(_scope([statement]))
            if getattr(done[-1], "is_scope", False):
                # A layer that is called makes its weights.
                self._made |= {node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and _is_set(node)}
        return done

    def _makes(self, node: ast.AST) -> bool:
        return any(isinstance(call, ast.Call) and self._is_making(call.func) for call in ast.walk(node))

    def _is_making(self, func: ast.expr) -> bool:
        return (isinstance(func, ast.Name) and func.id in self._made) or self._makes_by_name(func)

    def _makes_by_name(self, func: ast.expr) -> bool:
        parts: list[str] = []
        while isinstance(func, ast.Attribute):
            parts.append(func.attr)
            func = func.value
        if isinstance(func, ast.Name):
            parts.append(func.id)
        if parts and parts[-1] in self._own:
            return True
        is_of_keras = "keras" in parts or (bool(parts) and parts[-1] in self._imported)
        return (bool(parts) and parts[0] in _MODELS) or (is_of_keras and not {*parts}.isdisjoint(_MAKERS))


def _is_set(name: ast.Name) -> bool:
    return isinstance(name.ctx, ast.Store)


def _loops(node: ast.AST) -> bool:
    return any(
        isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in _LOOPS
        for call in ast.walk(node)
    )


def _scope(body: list[ast.stmt]) -> ast.With:
    scope: ast.With = ast.parse("with __strategy__().scope():\n    pass").body[0]  # type: ignore[assignment]
    scope.body, scope.is_scope = body, True  # type: ignore[attr-defined]
    return scope
