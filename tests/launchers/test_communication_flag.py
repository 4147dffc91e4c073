# SPDX-License-Identifier: Apache-2.0
"""The flags --communication and --telemetry reach every task, whatever starts it."""

import pathlib
import re

import pytest

from tfdist.launchers import local
from tfdist.launchers.kubernetes import launcher as kubernetes
from tfdist.launchers.slurm import launcher as slurm
from tfdist.launchers.ssh import launcher as ssh

LAUNCHERS = {local: [], ssh: ["--hosts=a,b", "--directory=/work"], slurm: [], kubernetes: ["--image=image"]}


@pytest.fixture
def script(tmp_path: pathlib.Path) -> str:
    path = tmp_path / "train.py"
    path.write_text("")
    return str(path)


@pytest.mark.parametrize("launcher", LAUNCHERS, ids=lambda launcher: launcher.__name__.rpartition(".")[2])
@pytest.mark.parametrize("chosen", ["auto", "tensorflow", "mpi"])
def test_every_task_is_told(launcher, chosen: str, script: str, capfd: pytest.CaptureFixture[str]):
    given = ["--dry_run", *LAUNCHERS[launcher], *([] if chosen == "auto" else [f"--communication={chosen}"])]
    assert launcher.main([*given, script]) == 0
    shown = capfd.readouterr().out
    assert ("TFDIST_COMMUNICATION" in shown) == (chosen != "auto")
    assert chosen == "auto" or chosen in shown


@pytest.mark.parametrize("launcher", LAUNCHERS, ids=lambda launcher: launcher.__name__.rpartition(".")[2])
@pytest.mark.parametrize(
    ("flag", "shown"),
    [("--telemetry=gs://a/b", r"gs://a/b"), ("--telemetry", r"logs/\d{8}-\d{6}"), ("--notelemetry", "")],
)
def test_telemetry_flag_with_or_without_a_directory_reaches_all_tasks(
    launcher, flag: str, shown: str, script: str, capfd: pytest.CaptureFixture[str]
):
    assert launcher.main(["--dry_run", *LAUNCHERS[launcher], flag, script]) == 0
    out = capfd.readouterr().out
    assert ("TFDIST_TELEMETRY" in out) == bool(shown)
    assert re.search(shown, out)
