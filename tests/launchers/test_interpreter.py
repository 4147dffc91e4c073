# SPDX-License-Identifier: Apache-2.0
"""A module of tfdist runs with the options and the `sys.path` of the program, not with the working directory."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import sysconfig
import zipfile

import pytest

from tfdist.launchers.supervise import processes

ROOT = str(pathlib.Path(__file__).resolve().parents[2])
# Runs, as a module, what prints where it imports from. The program may find tfdist by other means than its path.
PROGRAM = """
import json, subprocess, sys
{before}
seen = list(sys.path)
sys.path.append({root!r})
from tfdist.launchers.supervise import processes
sys.path[:] = seen
command = processes.module_command("shown", "an argument")
done = subprocess.run(command, capture_output=True, text=True)
print(json.dumps([sys.path, done.stdout, done.stderr]))
"""
SHOWN = """
import json, sys, token
flags = [sys.flags.isolated, sys.flags.no_site, sys.flags.optimize, sys.flags.dont_write_bytecode, sys.flags.utf8_mode]
print(json.dumps([sys.path, flags, sys.warnoptions, sys.argv[1:], __name__]))
"""
TRAP = "raise SystemExit('the working directory was imported from')"

pytestmark = pytest.mark.processes


@pytest.fixture
def work(tmp_path: pathlib.Path) -> pathlib.Path:
    """A working directory that hides modules; beside it a folder with a program and its module."""
    work = tmp_path / "work"
    work.mkdir()
    for name in ("token", "runpy", "json", "numpy"):
        (work / f"{name}.py").write_text(TRAP)
    program = tmp_path / "program"
    program.mkdir()
    (program / "shown.py").write_text(SHOWN)
    return work


def run(command: list[str], work: pathlib.Path, **env: str) -> tuple[list[str], list]:
    """The program's path, and what the module has seen."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [sys.executable, *command], cwd=work, env={**environment, **env}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    path, output, error = json.loads(done.stdout)
    assert output, error
    return path, json.loads(output)


def write(work: pathlib.Path, before: str = "") -> str:
    path = work.parent / "program" / "train.py"
    path.write_text(PROGRAM.format(before=before, root=ROOT))
    return str(path)


@pytest.mark.parametrize(
    ("options", "flags"),
    [
        ([], [0, 0, 0, 0, 0]),
        (["-I"], [1, 0, 0, 0, 0]),
        (["-S"], [0, 1, 0, 0, 0]),
        (["-E", "-s", "-OO", "-B"], [0, 0, 2, 1, 0]),
        (["-X", "utf8=1"], [0, 0, 0, 0, 1]),
        (["-P"], [0, 0, 0, 0, 0]),
    ],
    ids=repr,
)
def test_a_script_with_options(work: pathlib.Path, options: list[str], flags: list[int]) -> None:
    before = f"sys.path.insert(0, {str(work.parent / 'program')!r})"
    # tfdist's own dependencies.
    env = {"PYTHONPATH": sysconfig.get_path("purelib")} if "-S" in options else {}
    path, (seen, seen_flags, _, arguments, name) = run([*options, write(work, before)], work, **env)
    assert seen == [*path, ROOT]
    assert seen_flags == flags
    assert (arguments, name) == (["an argument"], "__main__")


def test_warnings_that_were_asked_for(work: pathlib.Path) -> None:
    _, (_, _, warnings, _, _) = run(["-Werror::SyntaxWarning", write(work)], work)
    assert "error::SyntaxWarning" in warnings


def test_a_program_given_as_text_and_a_module_see_the_working_directory_as_python_does(work: pathlib.Path) -> None:
    """The program itself imports from there, and so does what it starts: but as an absolute path."""
    (work / "token.py").unlink()
    for name in ("runpy", "json", "numpy"):
        (work / f"{name}.py").unlink()
    (work / "shown.py").write_text(SHOWN)
    script = pathlib.Path(write(work)).read_text()
    path, (seen, *_) = run(["-c", script], work)
    assert path[0] == ""
    assert seen == [str(work), *path[1:], ROOT]
    (work / "train.py").write_text(script)
    path, (seen, *_) = run(["-m", "train"], work)
    assert path[0] == str(work)
    assert seen == [*path, ROOT]


def test_a_zip_archive_as_the_program(work: pathlib.Path) -> None:
    archive = work.parent / "train.pyz"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("__main__.py", PROGRAM.format(before="", root=ROOT))
        file.writestr("shown.py", SHOWN)
    path, (seen, *_) = run([str(archive)], work)
    assert path[0] == str(archive)
    assert seen == [*path, ROOT]


def test_a_path_from_the_environment_keeps_its_place(work: pathlib.Path, tmp_path: pathlib.Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    path, (seen, *_) = run([write(work)], work, PYTHONPATH=str(other))
    assert seen[:2] == [str(tmp_path / "program"), str(other)]
    assert seen == [*path, ROOT]


def test_relative_entries_are_made_absolute_and_odd_ones_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", ["", "a", "/b", pathlib.Path("/c"), "/\udcff", ROOT])
    command = processes.module_command("shown")
    here = str(pathlib.Path.cwd())
    assert json.loads(command[-1]) == [here, f"{here}/a", "/b", "/\udcff", ROOT]
    assert command[-1].isascii()
