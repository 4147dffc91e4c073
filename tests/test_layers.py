# SPDX-License-Identifier: Apache-2.0
"""The package keeps its layers: who imports whom, what answers without TensorFlow, and which names are public."""

from __future__ import annotations

import ast
import functools
import pathlib
import subprocess
import sys
from collections.abc import Iterator

import pytest

import tfdist

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDERS = ("tfdist", "launch", "experiments", "benchmarks", "tests", ".ci")
MODULES = sorted((ROOT / "tfdist").rglob("*.py"))

# Which parts of tfdist each part may import. A new part gets a line here, and the arrow must point one way.
ARROWS: dict[str, set[str]] = {
    "__init__": {"cluster", "flags", "strategies"},
    "_addresses": set(),
    "_line_server": {"_addresses", "_sockets"},
    "_sockets": set(),
    "callbacks": {"learning_rate", "resume", "telemetry"},
    "cli": {"__init__", "cluster", "doctor", "launchers"},
    "cluster": {"_addresses"},
    "compat": set(),
    "compression": set(),
    "engines": {"_addresses", "_line_server", "_sockets", "cluster", "compat", "compression", "policies"},
    "doctor": {"__init__", "_addresses", "cluster", "doctor_meeting", "firewall", "launchers"},
    "firewall": {"_addresses", "cluster"},
    "doctor_meeting": {"_addresses", "_line_server", "_sockets", "cluster"},
    "flags": {"__init__", "callbacks", "cluster", "policies", "strategies"},
    "launchers": {"__init__", "_addresses", "_line_server", "_sockets", "cluster"},
    "learning_rate": set(),
    "policies": set(),
    "resume": {"engines", "launchers", "policies"},
    "schedules": set(),
    "serving": {"cluster", "engines", "launchers", "serving_task"},
    "data_worker": {"cluster", "engines", "launchers"},
    "serving_task": {"cluster", "data_worker", "engines"},
    "strategies": {"_addresses", "cluster", "compat", "compression", "engines", "policies", "serving", "telemetry"},
    "telemetry": {"cluster", "policies"},
    "testing": {"__init__", "cluster", "engines", "launchers", "policies", "serving", "strategies", "telemetry"},
}
LIGHT_FILES = (
    "__init__",
    "_addresses",
    "_line_server",
    "_sockets",
    "cli",
    "cluster",
    "doctor",
    "doctor_meeting",
    "firewall",
)
WITHOUT_TENSORFLOW = (*LIGHT_FILES, "launchers", "policies")
HEAVY = ("tensorflow", "keras", "numpy")


def _part(path: pathlib.Path) -> str:
    return path.relative_to(ROOT / "tfdist").parts[0].removesuffix(".py")


def _module(path: pathlib.Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def _name(path: pathlib.Path) -> str:
    return str(path.relative_to(ROOT))


@functools.cache
def _tree(path: pathlib.Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def _only_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def _imported(path: pathlib.Path) -> Iterator[str]:
    """Modules that `path` imports when it runs, those imported inside functions too; never those imported for types."""
    nodes: list[ast.AST] = [_tree(path)]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from _from(path, node)
        nodes.extend([] if _only_for_types(node) else ast.iter_child_nodes(node))


def _from(path: pathlib.Path, node: ast.ImportFrom) -> Iterator[str]:
    base = node.module or ""
    if node.level:
        package = path.relative_to(ROOT).parent.parts
        base = ".".join((*package[: len(package) - node.level + 1], *filter(None, [base])))
    yield from (f"{base}.{alias.name}" for alias in node.names)


def _imported_part(module: str) -> str:
    """The part of tfdist that an import means; `tfdist.MirroredStrategy` means the package itself."""
    part = module.split(".")[1] if "." in module else "__init__"
    return part if part in ARROWS else "__init__"


@pytest.mark.parametrize("path", MODULES, ids=_name)
def test_imports_follow_the_arrows(path: pathlib.Path):
    part = _part(path)
    assert part in ARROWS, f"tfdist/{part} has no line in ARROWS"
    imported = {_imported_part(module) for module in _imported(path) if module.split(".")[0] == "tfdist"}
    assert imported - {part} <= ARROWS[part]


def test_the_arrows_have_no_circle():
    # The package's own names are resolved on first use, so importing it imports none of its parts.
    arrows = {part: needs - {"__init__"} for part, needs in ARROWS.items() if part != "__init__"}
    while arrows:
        lowest = {part for part, needs in arrows.items() if not needs & arrows.keys()}
        assert lowest, f"these import each other: {sorted(arrows)}"
        arrows = {part: needs for part, needs in arrows.items() if part not in lowest}


@pytest.mark.parametrize("path", [*MODULES, *sorted((ROOT / "launch").rglob("*.py"))], ids=_name)
def test_nothing_imports_experiments_launch_or_benchmarks(path: pathlib.Path):
    assert not {module.split(".")[0] for module in _imported(path)} & {"experiments", "launch", "benchmarks", "tests"}


@pytest.mark.parametrize("path", [p for p in MODULES if _part(p) in WITHOUT_TENSORFLOW], ids=_name)
def test_light_modules_name_no_tensorflow(path: pathlib.Path):
    assert not {module.split(".")[0] for module in _imported(path)} & set(HEAVY)


def test_light_modules_import_without_tensorflow():
    modules = [_module(path) for path in MODULES if _part(path) in WITHOUT_TENSORFLOW]
    program = f"import importlib, sys\nfor name in {modules}: importlib.import_module(name)\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert not set(HEAVY) & set(done.stdout.split())


@pytest.mark.parametrize("path", [p for f in FOLDERS for p in sorted((ROOT / f).rglob("*.py"))], ids=_name)
def test_files_start_with_the_licence_and_say_what_they_are_for(path: pathlib.Path):
    assert path.read_text(encoding="utf-8").startswith("# SPDX-License-Identifier: Apache-2.0\n")
    assert ast.get_docstring(_tree(path))


def _defined(path: pathlib.Path) -> set[str]:
    """Names that a module defines itself at its top level."""
    names: set[str] = set()
    for node in _tree(path).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def _bound(path: pathlib.Path) -> set[str]:
    imports = [node for node in ast.walk(_tree(path)) if isinstance(node, ast.Import | ast.ImportFrom)]
    return _defined(path) | {(a.asname or a.name).split(".")[0] for node in imports for a in node.names}


def _assigned(path: pathlib.Path, name: str):
    for node in _tree(path).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return ast.literal_eval(node.value)
    return None


def test_each_public_name_has_one_home_that_defines_it():
    homes = _assigned(ROOT / "tfdist" / "__init__.py", "_HOME")
    assert set(tfdist.__all__) == {*homes, "__version__"}
    assert len(tfdist.__all__) == len(set(tfdist.__all__))
    paths = {_module(path): path for path in MODULES}
    missing = [name for name, home in homes.items() if home not in paths or name not in _defined(paths[home])]
    assert not missing


def test_type_checkers_see_the_public_names_too():
    blocks = [node for node in _tree(ROOT / "tfdist" / "__init__.py").body if _only_for_types(node)]
    imports = [node for block in blocks for node in ast.walk(block) if isinstance(node, ast.ImportFrom)]
    seen = {alias.asname or alias.name: node.module for node in imports for alias in node.names}
    assert seen == _assigned(ROOT / "tfdist" / "__init__.py", "_HOME")


@pytest.mark.parametrize("path", [p for p in MODULES if _assigned(p, "__all__") is not None], ids=_name)
def test_all_lists_what_the_module_makes_public(path: pathlib.Path):
    listed = set(_assigned(path, "__all__"))
    functions_and_classes = {node.name for node in _tree(path).body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    public = {name for name in functions_and_classes if not name.startswith("_")}
    homes = _assigned(path, "_HOME") or {}
    assert public <= listed <= _bound(path) | homes.keys()


def test_an_unknown_public_name_says_which():
    with pytest.raises(AttributeError, match="no attribute 'NoSuchName'"):
        tfdist.NoSuchName  # noqa: B018
