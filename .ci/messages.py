# SPDX-License-Identifier: Apache-2.0
"""Collects the error messages of tfdist out of its source, for the page "Messages" of the site. Standard library only.

`python .ci/messages.py` prints the page. `.ci/site_pages.py` puts it into the site.

Every call of an exception class is looked at, whether it is raised there or returned to a caller that raises it. The
text is a literal or an f-string; where it isn't, or has hardly any words of its own, names, constants, `.format`,
`join`, sums of texts and helper functions are followed, also to the callers that pass the text on.
"""

from __future__ import annotations

import ast
import collections
import dataclasses
import functools
import itertools
import pathlib
import re
from collections.abc import Iterator, Sequence

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "tfdist"
# With fewer fixed words a text is put together out of others, which are followed; with fewer still it is no sentence.
_WORDS_OF_A_TEXT = 3
_LEAST_WORDS = 2
_MOST_VARIANTS = 16
_DEPTH = 14
_VALUE = "…"
_UNKNOWN = [_VALUE]
_EXCEPTION = re.compile(r"_?[A-Z]\w*(Error|Exit)")
_SAME_TEXT = ("capitalize", "lower", "lstrip", "removeprefix", "removesuffix", "replace", "rstrip", "split", "strip")


@dataclasses.dataclass(frozen=True, order=True)
class Message:
    """An error with a text of its own; values that are put in are shown as `…`."""

    kind: str
    text: str
    modules: tuple[str, ...] = ()
    anchor: str = ""


@dataclasses.dataclass(frozen=True)
class Site:
    """A call of an exception class of which no text is known."""

    path: str
    line: int
    code: str


@dataclasses.dataclass(frozen=True)
class _Module:
    name: str
    path: pathlib.Path
    tree: ast.Module
    parents: dict[ast.AST, ast.AST]
    functions: dict[str, ast.FunctionDef]
    constants: dict[str, list[ast.expr]]
    imports: dict[str, tuple[str, str]]

    def function_of(self, node: ast.AST) -> ast.FunctionDef | None:
        """Returns the innermost function around a node."""
        found = self.parents.get(node)
        while found is not None and not isinstance(found, ast.FunctionDef):
            found = self.parents.get(found)
        return found


@dataclasses.dataclass(frozen=True)
class _Scope:
    """Where a text is read: a module, a function, the texts of the function's parameters, and how deep that is."""

    module: _Module
    function: ast.FunctionDef | None = None
    parameters: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    depth: int = 0

    def inner(self) -> _Scope:
        return dataclasses.replace(self, depth=self.depth + 1)


def messages(package: pathlib.Path = PACKAGE) -> list[Message]:
    """Returns the messages of all errors of the package, sorted by kind and text, each with an anchor of its own."""
    modules: dict[tuple[str, str], set[str]] = collections.defaultdict(set)
    for module, call in _sites(package):
        for text in _texts_of_site(module, call):
            modules[_kind(call), text].add(module.name)
    found = [Message(kind, text, tuple(sorted(names))) for (kind, text), names in modules.items()]
    return _with_anchors(sorted(found))


def unknown(package: pathlib.Path = PACKAGE) -> list[Site]:
    """Returns the calls of exception classes, and the raised results of functions, of which no text is known.

    Left out are errors without an argument, and those that put words in front of the text of another error.
    """
    found = []
    for module, call in _sites(package):
        if call.args and not _texts_of_site(module, call) and not _wraps(module, call):
            found.append(Site(str(module.path.relative_to(package.parent)), call.lineno, ast.unparse(call)))
    return found


def _with_anchors(found: list[Message]) -> list[Message]:
    """Gives each message its first nine words as an anchor, or as many as make a difference, or the kind as well."""

    def anchor(message: Message, words: int | None, kind: str) -> str:
        text = re.findall(r"[a-z0-9]+", message.text.replace(_VALUE, " ").lower())
        return "-".join([*([kind] if kind else []), *text[:words]])

    def forms(message: Message) -> Iterator[str]:
        yield anchor(message, 9, "")
        yield anchor(message, None, "")
        yield anchor(message, None, message.kind.lower())

    taken = collections.Counter(form for message in found for form in set(forms(message)))
    result = []
    for message in found:
        form = next((form for form in forms(message) if taken[form] == 1), None)
        if form is None:  # The same words, with the values at other places.
            form = f"{anchor(message, None, message.kind.lower())}-{len(result)}"
        result.append(dataclasses.replace(message, anchor=form))
    return result


@functools.cache
def _modules(package: pathlib.Path) -> dict[str, _Module]:
    found = {}
    for path in sorted(package.rglob("*.py")):
        name = ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__")
        found[name] = _module(name, path)
    return found


def _module(name: str, path: pathlib.Path) -> _Module:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    functions, imports = {}, {}
    constants: dict[str, list[ast.expr]] = collections.defaultdict(list)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            functions[node.name] = node
        elif isinstance(node, ast.ImportFrom) and node.module:
            imports |= {alias.asname or alias.name: (node.module, alias.name) for alias in node.names}
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(parents[node], (ast.Module, ast.ClassDef)):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name) and node.value is not None:
                    constants[target.id].append(node.value)
    return _Module(name, path, tree, parents, functions, constants, imports)


def _sites(package: pathlib.Path) -> Iterator[tuple[_Module, ast.Call]]:
    """Yields the calls of exception classes."""
    for module in _modules(package).values():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Call) and _EXCEPTION.fullmatch(ast.unparse(node.func).rpartition(".")[2]):
                yield module, node
            elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and _is_a_choice(node.exc.func):
                yield module, node.exc


def _is_a_choice(function: ast.expr) -> bool:
    """True for a class that is chosen when it is raised: `(TypeError if ... else ValueError)(...)`, `kind(...)`."""
    return isinstance(function, (ast.IfExp, ast.Subscript)) or ast.unparse(function) in ("kind", "type(error)")


def _kind(call: ast.Call) -> str:
    kind = ast.unparse(call.func).rpartition(".")[2].lstrip("_")
    return kind if _EXCEPTION.fullmatch(kind) else "Error"


def _texts_of_site(module: _Module, call: ast.Call) -> list[str]:
    """Returns the texts of an error; none if there is hardly a fixed word."""
    scope = _Scope(module, module.function_of(call))
    for argument in (*call.args, *(keyword.value for keyword in call.keywords)):
        plain = _plain(argument)
        if plain is not None and _words(plain) >= _WORDS_OF_A_TEXT:
            return [plain]
        texts = _followed(argument, scope)
        if texts:
            return texts
        if plain is not None and _words(plain) >= _LEAST_WORDS:
            return [plain]
    return []


def _followed(argument: ast.expr, scope: _Scope) -> list[str]:
    found = []
    for each in _scopes(scope):
        texts = [re.sub("Received:.*", "Received: …", _one_line(text)) for text in _texts(argument, each)]
        found += [text for text in texts if _words(text) >= _WORDS_OF_A_TEXT]
    return list(dict.fromkeys(found))


def _scopes(scope: _Scope) -> Iterator[_Scope]:
    """Yields the scope, with the texts that each of its function's callers passes on."""
    function = scope.function
    if function is None or scope.depth > 1:
        yield scope
        return
    calls = list(_callers(scope.module, function.name))
    if not calls:
        yield scope
    for module, call in calls:
        for caller in _scopes(_Scope(module, module.function_of(call), depth=scope.depth + 1)):
            for parameters in _bound(function, call, caller):
                yield _Scope(scope.module, function, parameters)


def _callers(module: _Module, name: str) -> list[tuple[_Module, ast.Call]]:
    near = [(other, call) for other, call in _calls().get(name, []) if _is_of(other, module, name)]
    return near + _calls().get(f"{module.name}.{name}", [])


def _is_of(other: _Module, module: _Module, name: str) -> bool:
    return other is module or (module.name, name) == other.imports.get(name)


@functools.cache
def _calls() -> dict[str, list[tuple[_Module, ast.Call]]]:
    """Returns all calls of the package by the name of what is called."""
    found = collections.defaultdict(list)
    for module in _modules(PACKAGE).values():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Call) and (name := _callee(node, module)):
                found[name].append((module, node))
    return dict(found)


def _callee(call: ast.Call, module: _Module) -> str:
    """Name of the called function; with its module, if that is written in front."""
    if isinstance(call.func, ast.Name):
        return call.func.id
    if isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name):
        owner = call.func.value.id
        if owner in ("self", "cls"):
            return call.func.attr
        if owner in module.imports:
            return ".".join((*module.imports[owner], call.func.attr))
    return ""


def _bound(function: ast.FunctionDef, call: ast.Call, scope: _Scope) -> Iterator[dict[str, list[str]]]:
    """Yields texts of the parameters; several times if an argument is a starred tuple that may be one of several."""
    names = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
    names = names[1:] if names[:1] in (["self"], ["cls"]) else names
    choices = [_tuples(each.value, scope) if isinstance(each, ast.Starred) else [[each]] for each in call.args]
    for values in itertools.islice(itertools.product(*choices), _MOST_VARIANTS):
        bound = {name: _texts(value, scope) for name, value in zip(names, itertools.chain(*values), strict=False)}
        bound |= {each.arg: _texts(each.value, scope) for each in call.keywords if each.arg}
        yield bound


def _tuples(node: ast.expr, scope: _Scope) -> list[list[ast.expr]]:
    """Returns the tuples of expressions that a starred argument may be."""
    if isinstance(node, (ast.Tuple, ast.List)):
        return [node.elts]
    if isinstance(node, ast.IfExp):
        return _tuples(node.body, scope) + _tuples(node.orelse, scope)
    if isinstance(node, ast.Name):
        return [found for value in _assigned(node.id, scope) for found in _tuples(value, scope)]
    if isinstance(node, ast.Call) and (helper := _helper(node, scope)):
        return [found for value in _returned(helper[1]) for found in _tuples(value, scope)]
    return []


def _texts(node: ast.expr | None, scope: _Scope) -> list[str]:
    """Returns the texts that an expression may have, with `…` for what is not known."""
    if node is None or scope.depth > _DEPTH:
        return _UNKNOWN
    scope = scope.inner()
    match node:
        case ast.Constant(value=str() as value):
            return [value]
        case ast.JoinedStr():
            return _product([_texts(each, scope) for each in node.values])
        case ast.FormattedValue():
            return _texts(node.value, scope)
        case ast.BinOp(op=ast.Add()):
            return _product([_texts(node.left, scope), _texts(node.right, scope)])
        case ast.BinOp(op=ast.Mod()):
            return [re.sub(r"%[\w.]+", _VALUE, text) for text in _texts(node.left, scope)]
        case ast.IfExp():
            return _either([node.body, node.orelse], scope)
        case ast.BoolOp():
            return _either(node.values, scope)
        case ast.ListComp() | ast.GeneratorExp():
            named = {each.target.id: each.iter for each in node.generators if isinstance(each.target, ast.Name)}
            loops = {name: _texts(each, scope) for name, each in named.items()}
            return _texts(node.elt, dataclasses.replace(scope, parameters=scope.parameters | loops))
        case ast.List() | ast.Tuple():
            return _either(node.elts, scope)
        case ast.Dict():
            return _either(node.values, scope)
        case ast.NamedExpr() | ast.Subscript():
            return _texts(node.value, scope)
        case ast.Call():
            return _texts_of_call(node, scope)
        case ast.Name():
            return scope.parameters.get(node.id) or _either(_assigned(node.id, scope), scope)
        case ast.Attribute(value=ast.Name(id=owner)):
            module = scope.module
            if owner in module.imports:
                other = _modules(PACKAGE).get(".".join(module.imports[owner]))
                return (
                    _either(other.constants.get(node.attr, []), _Scope(other, depth=scope.depth)) if other else _UNKNOWN
                )
            return _either(module.constants.get(node.attr, []), _Scope(module, depth=scope.depth))
    return _UNKNOWN


def _texts_of_call(call: ast.Call, scope: _Scope) -> list[str]:
    if isinstance(call.func, ast.Attribute):
        method = call.func.attr
        if method == "format":
            return [re.sub(r"{[^}]*}", _VALUE, text) for text in _texts(call.func.value, scope)]
        if method == "join" and call.args and isinstance(call.args[0], (ast.List, ast.Tuple)):
            separator = _texts(call.func.value, scope)
            parts = [[separator, _texts(each, scope)] for each in call.args[0].elts]
            return _product([texts for part in parts for texts in part][1:])
        if method == "join" and call.args:
            return _texts(call.args[0], scope)
        if method in _SAME_TEXT:
            return _texts(call.func.value, scope)
    if isinstance(call.func, ast.Name) and call.func.id in ("str", "sorted", "list", "tuple") and call.args:
        return _texts(call.args[0], scope)
    if helper := _helper(call, scope):
        module, function = helper
        found = []
        for parameters in itertools.islice(_bound(function, call, scope), _MOST_VARIANTS):
            found += _either(_returned(function), _Scope(module, function, parameters, scope.depth))
        return list(dict.fromkeys(found))[:_MOST_VARIANTS] or _UNKNOWN
    return _UNKNOWN


def _helper(call: ast.Call, scope: _Scope) -> tuple[_Module, ast.FunctionDef] | None:
    """Returns the function of the package that is called, and its module."""
    name = _callee(call, scope.module)
    if name in scope.module.functions:
        return scope.module, scope.module.functions[name]
    home, _, function = name.rpartition(".")
    if name in scope.module.imports:
        home, function = scope.module.imports[name]
    module = _modules(PACKAGE).get(home)
    return (module, module.functions[function]) if module and function in module.functions else None


def _returned(function: ast.FunctionDef) -> list[ast.expr]:
    return [
        node.value
        for node in ast.walk(function)
        if isinstance(node, (ast.Return, ast.Yield)) and node.value is not None
    ]


def _assigned(name: str, scope: _Scope) -> list[ast.expr]:
    """Returns what is assigned or appended to a name in the function, or else in the module, or where it comes from."""
    found = _assignments(scope.function).get(name, []) if scope.function else []
    if not found and name in scope.module.imports:
        home, original = scope.module.imports[name]
        other = _modules(PACKAGE).get(home)
        return other.constants.get(original, []) if other else []
    return found or scope.module.constants.get(name, [])


@functools.cache
def _assignments(function: ast.FunctionDef) -> dict[str, list[ast.expr]]:
    found = collections.defaultdict(list)
    for node in ast.walk(function):
        match node:
            case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)):
                for target, value in zip(names, values, strict=False):
                    found[ast.unparse(target)].append(value)
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AugAssign(target=ast.Name(id=name), value=value)
            ):
                found[name].append(value)
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                found[name].append(value)
            case ast.NamedExpr(target=ast.Name(id=name), value=value) | ast.For(target=ast.Name(id=name), iter=value):
                found[name].append(value)
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="append"), args=[value]):
                found[name].append(value)
    return dict(found)


def _either(nodes: Sequence[ast.expr], scope: _Scope) -> list[str]:
    found = [text for node in nodes for text in _texts(node, scope)]
    # An empty text is where something begins that is filled later.
    return [text for text in dict.fromkeys(found) if text][:_MOST_VARIANTS] or _UNKNOWN


def _product(parts: Sequence[list[str]]) -> list[str]:
    found = ["".join(each) for each in itertools.islice(itertools.product(*parts), _MOST_VARIANTS)]
    return list(dict.fromkeys(found))


def _plain(node: ast.expr) -> str | None:
    """Returns a literal or an f-string as one line; None for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return _one_line(node.value)
    if isinstance(node, ast.JoinedStr):
        return _one_line("".join(str(part.value) if isinstance(part, ast.Constant) else _VALUE for part in node.values))
    return None


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _words(text: str) -> int:
    """Number of fixed words that say something."""
    return len(
        [word for word in text.split() if re.search("[A-Za-z]{2}", word) and word not in ("Received:", "TF_CONFIG:")]
    )


def _wraps(module: _Module, call: ast.Call) -> bool:
    """True if the text has that of another error, which `except ... as name` has caught."""
    names = {node.id for argument in call.args for node in ast.walk(argument) if isinstance(node, ast.Name)}
    function = module.function_of(call) or module.tree
    caught = {node.name for node in ast.walk(function) if isinstance(node, ast.ExceptHandler) and node.name}
    return bool(names & caught)


def page() -> str:
    """Returns the page, in Markdown."""
    found = messages()
    lines = [
        "# Messages",
        "",
        f"All {len(found)} errors that tfdist raises with a text of its own. `…` stands for a value.",
        "",
    ]
    lines += ["[Troubleshooting](troubleshooting.md) explains those that need more than their own text.", ""]
    last = None
    for message in found:
        if message.kind != last:
            lines += [f"## {message.kind}", ""]
            last = message.kind
        text = message.text.replace("`", "'").replace("|", "\\|")
        modules = ", ".join(f"`{module}`" for module in message.modules)
        lines += [f'<a id="{message.anchor}"></a>`{text}`', f": in {modules}", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    print(page())
