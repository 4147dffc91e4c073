# SPDX-License-Identifier: Apache-2.0
"""The documentation holds: what it shows runs, what it links to is there, and the names in it exist."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import subprocess
import sys

import psutil
import pytest

import tfdist
from tfdist.launchers import local

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("experiments/*/README.md")])
PAGES += [ROOT / "benchmarks" / "README.md"]

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_NAME = re.compile(r"\btfdist((?:\.[A-Za-z_]\w*)+)")
_MAKE = re.compile(r"^(?:```\n)?make ([a-z-]+)|`make ([a-z-]+)", re.MULTILINE)
_FLAG = re.compile(r"^\| `--(\w+)", re.MULTILINE)
_PATH = re.compile(r"`([\w.-]+/[\w./-]*)`")
_ARCHITECTURE = ROOT / "docs" / "architecture.md"


def _text(page: pathlib.Path) -> str:
    return page.read_text(encoding="utf-8")


def _blocks(page: pathlib.Path, language: str) -> list[str]:
    return [code for name, code in _BLOCK.findall(_text(page)) if name == language]


def _prose(page: pathlib.Path) -> str:
    return _BLOCK.sub("", _text(page))


def _anchor(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def _id(page: pathlib.Path) -> str:
    return str(page.relative_to(ROOT))


def _run(arguments: list[str], directory: pathlib.Path, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    """Runs Python in `directory`, and fails if a process that it has started outlives it."""
    environment = {**os.environ, "TFDIST_TEST_DOCS": str(directory)}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=directory,
        env=environment,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=110,
    )
    _, alive = psutil.wait_procs(_started_by(directory), timeout=10)
    for process in alive:
        process.kill()
    assert not alive
    return done


def _started_by(directory: pathlib.Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("TFDIST_TEST_DOCS") == str(directory):
                found.append(process)
    return found


def _assert_trained(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    assert "Epoch 5/5" in done.stdout


@pytest.fixture
def quick_start() -> str:
    return _blocks(ROOT / "README.md", "python")[0]


def test_the_quick_start_is_ten_lines(quick_start: str) -> None:
    assert len([line for line in quick_start.splitlines() if line.strip()]) <= 10


# Programs of other tests are scripts.
@pytest.mark.slow
@pytest.mark.processes
def test_the_quick_start_runs_as_a_script(quick_start: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / "train.py").write_text(quick_start)
    _assert_trained(_run(["train.py"], tmp_path))


@pytest.mark.processes
def test_the_quick_start_runs_when_pasted(quick_start: str, tmp_path: pathlib.Path) -> None:
    done = _run(["-i", "-q"], tmp_path, stdin=quick_start)
    _assert_trained(done)
    assert "SyntaxError" not in done.stderr


@pytest.mark.parametrize("page", PAGES, ids=_id)
def test_python_in_the_pages_can_be_compiled(page: pathlib.Path) -> None:
    for code in _blocks(page, "python"):
        compile(code, _id(page), "exec")


def test_the_cluster_example_runs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    (code,) = _blocks(ROOT / "docs" / "cluster.md", "python")
    exec(compile(code, "docs/cluster.md", "exec"), {})
    assert "worker:1 False worker:0 2 10.0.0.3:2222" in capsys.readouterr().out


def test_the_tf_config_example_is_one() -> None:
    (text,) = _blocks(ROOT / "docs" / "cluster.md", "json")
    tfdist.Cluster.from_tf_config(text).check_parameter_server()


@pytest.mark.parametrize("page", PAGES, ids=_id)
def test_what_is_linked_to_is_there(page: pathlib.Path) -> None:
    for link in _LINK.findall(_prose(page)):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{_id(page)} links to {link}"
        if anchor:
            assert anchor in map(_anchor, _HEADING.findall(_text(target))), f"{_id(page)} links to {link}"


@pytest.mark.parametrize("page", PAGES, ids=_id)
def test_names_in_the_pages_exist(page: pathlib.Path) -> None:
    for dotted in _NAME.findall(_text(page)):
        parts = dotted.strip(".").split(".")
        path = ROOT.joinpath("tfdist", *parts)
        is_module = path.is_dir() or path.with_suffix(".py").exists()
        is_in_module = (ROOT / "tfdist" / parts[0]).is_dir() or (ROOT / "tfdist" / f"{parts[0]}.py").exists()
        assert is_module or parts[0] in tfdist.__all__ or (is_in_module and _exists(dotted)), (
            f"{_id(page)}: tfdist{dotted}"
        )


@pytest.mark.parametrize("page", [_ARCHITECTURE, ROOT / "CONTRIBUTING.md"], ids=_id)
def test_paths_in_pages_for_developers_exist(page: pathlib.Path) -> None:
    for path in _PATH.findall(_text(page)):
        # "engines/base.Engine" is a class in tfdist/engines/base.py.
        names = [f"{each}{ending}" for each in (path, path.rpartition(".")[0]) for ending in ("", ".py") if each]
        assert any((folder / name).exists() for folder in (ROOT, ROOT / "tfdist") for name in names), path


def test_the_architecture_names_every_part_of_the_package() -> None:
    layers = _blocks(_ARCHITECTURE, "")[0]
    package = ROOT / "tfdist"
    found = [*package.glob("*.py"), *(init.parent for init in package.glob("*/__init__.py"))]
    parts = {path.stem for path in found} - {"__init__"}
    assert {part for part in parts if not re.search(rf"\b{part}\b", layers)} == set()


def _exists(dotted: str) -> bool:
    """Returns True if tfdist<dotted> can be reached from the package."""
    found: object = tfdist
    for name in dotted.strip(".").split("."):
        found = getattr(found, name, None)
    return found is not None


@pytest.mark.parametrize("page", PAGES, ids=_id)
def test_targets_of_make_exist(page: pathlib.Path) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    for found in _MAKE.findall(_text(page)):
        assert "".join(found) in targets, f"{_id(page)}: make {''.join(found)}"


def test_every_flag_of_the_launcher_is_in_its_page() -> None:
    from absl import flags

    values = flags.FlagValues()
    local.define_flags(values)
    documented = set(_FLAG.findall(_text(ROOT / "docs" / "launching.md")))
    assert {name for name in values if len(name) > 1} <= documented | {"help"}


def test_every_page_is_reached_from_the_readme() -> None:
    start = ROOT / "README.md"
    reached, new = set(), {start}
    while new:
        reached |= new
        links = {
            (page.parent / link.partition("#")[0]).resolve() for page in new for link in _LINK.findall(_text(page))
        }
        new = (links & set(PAGES)) - reached
    assert set(PAGES) == reached


def test_no_page_names_a_place_on_one_machine() -> None:
    for page in PAGES:
        assert not re.search(r"/(?:home|root|Users|work)/", _text(page)), _id(page)
