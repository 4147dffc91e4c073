# SPDX-License-Identifier: Apache-2.0
"""The console command answers, at once and in one line where something is wrong."""

import importlib
import pathlib
import subprocess
import sys

import pytest

import tfdist
from tfdist import cli


def test_help(capsys):
    assert cli.main(["--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: tfdist launch PLATFORM")


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"tfdist {tfdist.__version__}\n"


def test_launch_help_lists_the_platforms(capsys):
    assert cli.main(["launch", "--help"]) == 0
    assert "\n  local " in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["launch"]])
def test_nothing_to_do_is_an_error_that_shows_the_usage(arguments, capsys):
    assert cli.main(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("usage: ")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["lunch"],
            (
                "tfdist: unknown command; use launch, doctor, profile, advise, simulate, watch or trace "
                "(see tfdist --help). Received: 'lunch'\n"
            ),
        ),
        (
            ["launch", "slrum", "train.py"],
            "tfdist: unknown platform; there is: {platforms} (see tfdist launch --help). Received: 'slrum'\n",
        ),
        (
            ["launch", "--num_workers=2", "local"],
            "tfdist: unknown platform; there is: {platforms} (see tfdist launch --help). Received: '--num_workers=2'\n",
        ),
    ],
)
def test_what_is_unknown_is_one_line_and_code_2(arguments, line, capsys):
    assert cli.main(arguments) == 2
    assert capsys.readouterr().err == line.format(platforms=", ".join(cli.PLATFORMS))


def test_every_platform_has_a_command():
    assert all(callable(importlib.import_module(f"tfdist.launchers.{name}").main) for name in cli.PLATFORMS)


@pytest.mark.parametrize("platform", cli.PLATFORMS)
def test_every_platform_has_a_front_a_flagfile_and_a_page(platform, capsys):
    root = pathlib.Path(cli.__file__).resolve().parents[1]
    assert f'["launch", "{platform}", *sys.argv[1:]]' in (root / "launch" / f"{platform}.py").read_text()
    pages = [root / "docs" / "launching" / f"{platform}.md", root / "docs" / "launching.md"]
    page = "".join(path.read_text() for path in pages if path.exists())
    assert f"launch/{platform}.flags" in page
    flagfile = f"--flagfile={root / 'launch' / f'{platform}.flags'}"
    assert cli.main(["launch", platform, flagfile, "--dry_run", str(root / "setup.py")]) == 0
    assert capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments", [["--help"], ["launch", "--help"], *(["launch", p, "--help"] for p in cli.PLATFORMS)]
)
def test_the_command_imports_no_tensorflow(arguments):
    code = f"import sys; from tfdist import cli; cli.main({arguments}); sys.exit('tensorflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60).returncode == 0
