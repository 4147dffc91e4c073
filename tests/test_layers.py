# SPDX-License-Identifier: Apache-2.0
"""The package keeps its layers: who imports whom, what answers without TensorFlow, and which names are public."""

from __future__ import annotations

import ast
import contextlib
import functools
import graphlib
import importlib
import pathlib
import re
import subprocess
import sys
import types
from collections.abc import Collection, Iterable, Iterator

import private_names
import pytest

import tfdist
from tfdist.compat import versions

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDERS = ("tfdist", "launch", "experiments", "benchmarks", "tests", ".ci")
MODULES = sorted((ROOT / "tfdist").rglob("*.py"))

# Which parts of tfdist each part may import. A new part gets a line here, and the arrow must point one way. Lower parts
# come first. An import for type checkers counts: an arrow is an arrow.
_STEPS = {
    "_forks",
    "_log",
    "compat",
    "coordination",
    "model_parallel",
    "passes",
    "policies",
    "step",
    "transforms",
    "transport",
}
_ENGINES = {*_STEPS, "engines.base"}
# Parameter servers have three engines, each made of the one before it.
_SERVERS = {*_ENGINES, "compression", "engines.transfer", "tables"}
ARROWS: dict[str, set[str]] = {
    "_checks": set(),
    "_files": set(),
    "_forks": set(),
    "_log": set(),
    "_machine": set(),
    "_sockets": {"_forks"},
    "cluster": {"_sockets"},
    "policies": set(),
    "coordination": {"_forks", "_log", "_sockets", "cluster", "policies"},
    "compat": {"_forks", "_log"},
    "transport": {"_forks", "_log", "_machine", "compat", "launchers"},
    # Codecs know neither strategies nor engines.
    "compression": {"_log", "compat"},
    "passes": {"_log", "compat"},
    # Users' own transforms are like those: nothing of tfdist's is needed.
    "transforms": set(),
    # The kind and the model of a step: below the rest of `step`, which places replicas on devices.
    "step.step": {"_log", "compat", "passes"},
    "model_parallel": {"compat"},
    "step": {
        "_log",
        "compat",
        "model_parallel",
        "passes",
        "policies",
        "step.step",
        "telemetry.update_log",
        "transforms",
        "transport",
    },
    "tables": {"compat", "step", "transport"},
    "engines": set(),
    "engines.base": {"passes", "policies", "step.step"},
    # Engines don't import each other.
    "engines.agreement": {*_ENGINES, "_sockets", "cluster"},
    "engines.synchronous": _ENGINES,
    "engines.threads": _ENGINES,
    "engines.quorum": {*_ENGINES, "engines.agreement"},
    "engines.averaging_step": _ENGINES,
    "engines.averaging": {*_ENGINES, "engines.averaging_step"},
    "engines.warmup": _ENGINES,
    "engines.transfer": {*_STEPS, "compression", "tables"},
    "engines.accumulation": {"compat"},
    "engines.server_calls": _SERVERS,
    "engines.worker_function": {*_SERVERS, "engines.accumulation"},
    "engines.step_queue": {*_SERVERS, "engines.accumulation", "engines.worker_function"},
    "engines.asynchronous": {*_SERVERS, "engines.step_queue", "engines.worker_function"},
    "engines.rounds": {*_SERVERS, "engines.asynchronous", "engines.worker_function"},
    "engines.streams": {*_SERVERS, "engines.rounds"},
    "telemetry.update_log": {"_files", "_forks", "policies"},
    "telemetry": {"_forks", "_log", "cluster", "compat", "coordination", "passes", "policies", "telemetry.update_log"},
    "launchers": {"__init__", "_log", "_machine", "_sockets", "cluster"},
    "serving": {
        "_forks",
        "_log",
        "_machine",
        "_sockets",
        "cluster",
        "compat",
        "compression",
        "coordination",
        "launchers",
    },
    "strategies": {
        *_STEPS,
        "_machine",
        "_sockets",
        "cluster",
        "compression",
        "engines",
        "launchers",
        "serving",
        "tables",
        "telemetry",
    },
    "resume": {*_STEPS, "_files", "launchers"},
    "schedules": set(),
    # Public modules whose names live below.
    "callbacks": {"_log", "cluster", "resume", "telemetry"},
    "simulation": {"planning.simulation"},
    "update_log": {"telemetry.update_log"},
    "flags": {"__init__", "callbacks", "cluster", "policies", "strategies"},
    "planning.simulation": {"policies"},
    "planning.simulate": {
        "__init__",
        "_files",
        "_log",
        "flags",
        "launchers",
        "planning.simulation",
        "telemetry.update_log",
    },
    "planning.replay": {"flags", "planning.simulation", "policies", "telemetry", "telemetry.update_log"},
    "planning": {
        "_files",
        "doctor.measure",
        "launchers",
        "planning.replay",
        "planning.simulation",
        "policies",
        "telemetry.update_log",
    },
    # These train, the rest of `planning` only computes.
    "planning.measuring": {"__init__", "_machine", "compat", "planning", "policies"},
    "planning.profile_command": {
        "__init__",
        "_files",
        "_machine",
        "compat",
        "launchers",
        "planning",
        "planning.measuring",
        "policies",
    },
    "testing": {
        "_forks",
        "__init__",
        "cluster",
        "coordination",
        "launchers",
        "planning.simulation",
        "policies",
        "serving",
        "strategies",
        "telemetry",
        "transforms",
    },
    # Its advice is that of `tfdist advise`.
    "watching.tensorboard": {"planning.replay", "policies", "telemetry", "telemetry.update_log"},
    "watching": {"_files", "_log", "launchers", "policies", "telemetry", "telemetry.update_log"},
    "doctor.measure": {"_files", "_log", "_sockets", "cluster"},
    "doctor": {"__init__", "_log", "_sockets", "cli", "cluster", "doctor.measure", "launchers"},
    "cli": {"__init__", "_log", "launchers"},
    "__main__": {"cli"},
    # Its names are resolved on first use, so importing it imports none of its parts.
    "__init__": {
        "_machine",
        "callbacks",
        "cluster",
        "compression",
        "flags",
        "model_parallel",
        "policies",
        "schedules",
        "simulation",
        "strategies",
        "tables",
        "testing",
        "transforms",
        "update_log",
    },
}
LIGHT_FILES = (
    "__init__",
    "__main__",
    "_checks",
    "_files",
    "_log",
    "_machine",
    "_sockets",
    "cli",
    "cluster",
    "simulation",
)
WITHOUT_TENSORFLOW = (
    *LIGHT_FILES,
    "coordination",
    "doctor",
    "doctor.measure",
    "launchers",
    "planning",
    "planning.simulate",
    "planning.simulation",
    "policies",
)
HEAVY = ("tensorflow", "keras", "numpy")
# These read and write arrays, but answer at once, too.
WITH_NUMPY = ("planning.replay", "telemetry.update_log", "update_log", "watching")


def _part(path: pathlib.Path) -> str:
    return _part_of(_module(path))


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
    """Modules that `path` imports: those imported inside functions and for type checkers too."""
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from _from(path, node)


def _from(path: pathlib.Path, node: ast.ImportFrom) -> Iterator[str]:
    base = node.module or ""
    if node.level:
        package = path.relative_to(ROOT).parent.parts
        base = ".".join((*package[: len(package) - node.level + 1], *filter(None, [base])))
    yield from (f"{base}.{alias.name}" for alias in node.names)


def _part_of(module: str) -> str:
    """The part of tfdist that a module belongs to; `tfdist.MirroredStrategy` means the package itself."""
    names = module.split(".")[1:3]
    parts = (".".join(names), *names[:1])
    return next((part for part in parts if part in ARROWS), "__init__")


def test_imports_follow_the_arrows():
    homeless = [_name(path) for path in MODULES if _part(path) == "__init__" and path.parent.name != "tfdist"]
    assert not homeless, f"these have no line in ARROWS: {homeless}"
    for path in MODULES:
        imported = {_part_of(module) for module in _imported(path) if module.split(".")[0] == "tfdist"}
        # Checks of arguments are everybody's.
        allowed = {_part(path), "_checks", *ARROWS[_part(path)]}
        # Who may import "engines" may import each of them.
        assert {each for each in imported if not {each, each.split(".")[0]} & allowed} == set(), path


def test_the_arrows_have_no_circle():
    arrows = {part: needs - {"__init__"} for part, needs in ARROWS.items() if part != "__init__"}
    graphlib.TopologicalSorter(arrows).prepare()


def _importing(paths: Iterable[pathlib.Path], packages: Collection[str]) -> list[str]:
    """Names of the files that import one of these."""
    return [_name(path) for path in paths if not {each.split(".")[0] for each in _imported(path)}.isdisjoint(packages)]


def test_nothing_imports_experiments_launch_or_benchmarks():
    paths = [*MODULES, *(ROOT / "launch").rglob("*.py")]
    assert _importing(paths, ("experiments", "launch", "benchmarks", "tests")) == []


def test_tools_use_names_that_tfdist_has():
    paths = (path for folder in ("benchmarks", "experiments", "examples") for path in (ROOT / folder).rglob("*.py"))
    for path in paths:
        modules = {}
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "tfdist":
                for alias in node.names:
                    found = _imported_value(f"{node.module}.{alias.name}")
                    assert found is not None, f"{_name(path)}:{node.lineno}: {node.module} has no {alias.name}"
                    modules[alias.asname or alias.name] = found
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                owner = modules.get(node.value.id)
                is_there = not isinstance(owner, types.ModuleType) or hasattr(owner, node.attr)
                assert is_there, f"{_name(path)}:{node.lineno}: {node.value.id} has no {node.attr}"


def _imported_value(name: str) -> object:
    module, _, attribute = name.rpartition(".")
    with contextlib.suppress(ImportError):
        return importlib.import_module(name)
    return getattr(importlib.import_module(module), attribute, None)


def test_light_modules_name_no_tensorflow():
    assert _importing((path for path in MODULES if _part(path) in WITHOUT_TENSORFLOW), HEAVY) == []


@pytest.mark.parametrize(("parts", "heavy"), [(WITHOUT_TENSORFLOW, HEAVY), (WITH_NUMPY, HEAVY[:2])])
def test_light_modules_import_without_tensorflow(parts: Collection[str], heavy: Collection[str]):
    modules = [_module(path) for path in MODULES if _part(path) in parts]
    program = f"import importlib, sys\nfor name in {modules}: importlib.import_module(name)\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert not set(heavy) & set(done.stdout.split())


def test_files_start_with_the_licence_and_say_what_they_are_for():
    for path in (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        assert path.read_text(encoding="utf-8").startswith("# SPDX-License-Identifier: Apache-2.0\n"), path
        assert ast.get_docstring(_tree(path)), path


def _has_tests(path: pathlib.Path) -> bool:
    return any(
        (isinstance(node, ast.FunctionDef) and node.name.startswith("test_"))
        or (isinstance(node, ast.ClassDef) and node.name.startswith("Test"))
        for node in _tree(path).body
    )


def test_files_with_tests_are_named_so_that_they_run():
    paths = sorted((ROOT / "tests").rglob("*.py"))
    texts = [path.read_text(encoding="utf-8") for path in paths if path.name.startswith("test_")]
    run = {name for text in texts for name in re.findall(r'child_pytest\.files\("(\w+)"\)', text)}
    others = [path.name for path in paths if _has_tests(path) and not path.name.startswith("test_")]
    is_run = {name: name.endswith("_checks.py") and any(name.startswith(f"{each}_") for each in run) for name in others}
    assert len(others) > 10 and all(is_run.values()), is_run


@functools.cache
def _own_names() -> set[str]:
    return private_names.defined(_tree(path) for path in MODULES if _part(path) != "compat")


@functools.cache
def _foreign_names() -> set[str]:
    """The private attributes that compat/ needs, such as `_value` of "keras:Variable._value"."""
    needs = [need for each in versions.all_needs().values() for need in each]
    names = {re.split("[:.]", need.partition("(")[0])[-1] for need in needs}
    return {name for name in names if name.startswith("_") and not name.startswith("__")}


def test_private_names_are_reached_in_compat_only():
    """What is below the public surface of TensorFlow and Keras. Modules that name neither can't."""
    for path in MODULES:
        if _part(path) not in ("compat", *WITHOUT_TENSORFLOW):
            assert list(private_names.find(_tree(path), _own_names(), _foreign_names())) == [], path


_REACHING = (
    "from tensorflow.python.eager import context",
    "from tensorflow.python import tf2",
    "import keras.src.backend",
    "from keras import src\nsrc.backend",
    "import tf_keras",
    "def f():\n    from tensorflow.core.protobuf import config_pb2",
    "frame = sys._getframe(1)",
    "frame = inspect.currentframe()",
    "caller = frame.f_back",
    "model = frame.f_locals['self']",
    "optimizer._trainable_variables",
    "self.model._loss_tracker",
    "self._theirs",
    "getattr(optimizer, '_learning_rate', None)",
    "hasattr(strategy.extended, '_num_workers')",
    "variable._value",
    "operation._add_control_input(other)",
    "setattr(model, name, 1)",
    "object.__setattr__(model, '_own', 1)",
    "object.__delattr__(model, '_own')",
    "vars(model)['train_step'] = step",
    "del vars(model)['train_step']",
    "vars(function).setdefault('_own', {})",
    "model.__dict__['train_step'] = step",
    "strategy.extended.colocate_vars_with = colocate",
)


def test_the_finder_finds_what_reaches_past_the_surface():
    for source in _REACHING:
        assert list(private_names.find(ast.parse(source), own={"_own"}, foreign={"_value"})), source


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
    homes = _assigned(ROOT / "tfdist" / "__init__.py", "MODULE_OF")
    assert set(tfdist.__all__) == {*homes, "__version__"}
    assert len(tfdist.__all__) == len(set(tfdist.__all__))
    paths = {_module(path): path for path in MODULES}
    missing = [name for name, home in homes.items() if home not in paths or name not in _defined(paths[home])]
    assert not missing


def test_type_checkers_see_the_public_names_too():
    blocks = [node for node in _tree(ROOT / "tfdist" / "__init__.py").body if _only_for_types(node)]
    imports = [node for block in blocks for node in ast.walk(block) if isinstance(node, ast.ImportFrom)]
    seen = {alias.asname or alias.name: node.module for node in imports for alias in node.names}
    assert seen == _assigned(ROOT / "tfdist" / "__init__.py", "MODULE_OF")


def test_all_lists_what_the_module_makes_public():
    for path in MODULES:
        if (listed := _assigned(path, "__all__")) is not None:
            nodes = [node for node in _tree(path).body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
            homes = _assigned(path, "MODULE_OF") or {}
            public = {node.name for node in nodes if not node.name.startswith("_")}
            assert public <= set(listed) <= _bound(path) | homes.keys(), path


def test_an_unknown_public_name_says_which():
    with pytest.raises(AttributeError, match="no attribute 'NoSuchName'"):
        tfdist.NoSuchName  # noqa: B018


def test_engines_do_not_import_each_other_in_a_circle():
    paths = {_module(path): path for path in MODULES if _module(path).startswith("tfdist.engines.")}
    needs = {module: _modules_imported(path, paths.keys()) - {module} for module, path in paths.items()}
    graphlib.TopologicalSorter(needs).prepare()


def _modules_imported(path: pathlib.Path, known: Collection[str]) -> set[str]:
    """Of the known modules those that `path` imports, itself or a name of theirs."""
    imported = set(_imported(path))
    return (imported | {name.rpartition(".")[0] for name in imported}) & set(known)


# Commands, whose output is what they are for.
_COMMANDS = ("cli", "doctor", "planning", "watching", "launchers")


def _written_streams(path: pathlib.Path) -> set[str]:
    """The streams that a module writes to by `print`, `sys.stdout.write` or `sys.stderr.write`."""
    calls = [ast.unparse(node.func) for node in ast.walk(_tree(path)) if isinstance(node, ast.Call)]
    return {call for call in calls if call in ("print", "sys.stdout.write", "sys.stderr.write")}


def test_lines_to_the_user_are_logged_behind_one_prefix():
    for path in (path for path in MODULES if _module(path) != "tfdist._log"):
        assert not re.search(r"""["']tfdist: """, path.read_text(encoding="utf-8")), path
        allowed = {"sys.stdout.write"} if _part(path).split(".")[0] in _COMMANDS else set()
        # The script of `tfdist profile` runs in the same process and may configure logging.
        allowed |= {"sys.stderr.write"} if _part(path) == "planning.profile_command" else set()
        assert _written_streams(path) <= allowed, path


# How the package is cut. These go down, not up: a file that one other file imports belongs into that file, unless it is
# an idea of its own (a program that is started by its name, a public class, an engine).
MOST_FILES = 208
MOST_WITH_ONE_IMPORTER = 34
MOST_IN_COMPAT = 22
MOST_LINES = 810
MOST_SHARED_NAMES = 0
# All lines, by folder and ending. What is added is taken away elsewhere.
MOST_LINES_IN_ALL = {("tfdist", "py"): 48_699, ("tfdist", "js"): 1_379, ("tests", "py"): 39_512}


@functools.cache
def _importers() -> dict[str, set[str]]:
    """For each module the modules that import it, itself or a name of it."""
    known = {_module(path) for path in MODULES}
    found: dict[str, set[str]] = {module: set() for module in known}
    for path in MODULES:
        for imported in _imported(path):
            home = imported if imported in known else imported.rpartition(".")[0]
            if home in known and home != _module(path):
                found[home].add(_module(path))
    return found


def test_the_package_has_few_files():
    assert len(MODULES) <= MOST_FILES
    assert sum(_part(path) == "compat" for path in MODULES) <= MOST_IN_COMPAT


@pytest.mark.parametrize(("folder", "ending"), MOST_LINES_IN_ALL)
def test_lines_in_all_become_fewer(folder: str, ending: str):
    paths = (ROOT / folder).rglob(f"*.{ending}")
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)
    assert lines <= MOST_LINES_IN_ALL[folder, ending]


def test_few_modules_have_one_importer():
    folders = {_module(path) for path in MODULES if path.name == "__init__.py"}
    single = sorted(module for module, by in _importers().items() if len(by) == 1 and module not in folders)
    assert len(single) <= MOST_WITH_ONE_IMPORTER, single


def test_no_file_is_longer_than_an_idea():
    assert [_name(path) for path in MODULES if len(path.read_text(encoding="utf-8").splitlines()) > MOST_LINES] == []


def test_few_classes_share_a_name():
    homes: dict[str, list[str]] = {}
    for path in MODULES:
        for node in _tree(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(_module(path))
    shared = {name: where for name, where in homes.items() if len(where) > 1}
    assert len(shared) <= MOST_SHARED_NAMES, shared
