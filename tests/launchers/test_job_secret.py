# SPDX-License-Identifier: Apache-2.0
"""The job's secret: each task has it, and it is in no log, no output, no dry run and no command line."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

from tfdist import cli

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Hands the secret to the test, and fails after that, so that the launcher says all that it has to say.
_SCRIPT = """
import os, pathlib, sys
secret = os.environ["TFDIST_JOB_SECRET"]
(pathlib.Path(sys.argv[1]) / str(os.getpid())).write_text(secret)
shown = [each for each in pathlib.Path("/proc").glob("[0-9]*/cmdline") if secret in each.read_text(errors="replace")]
print("on command lines:", shown)
sys.exit(3)
"""


@pytest.mark.processes
@pytest.mark.skipif(not pathlib.Path("/proc/self/cmdline").exists(), reason="needs /proc")
def test_the_secret_of_a_job_is_shown_nowhere(tmp_path: pathlib.Path):
    (tmp_path / "script.py").write_text(_SCRIPT)
    found, logs = tmp_path / "found", tmp_path / "logs"
    found.mkdir()
    flags = [f"--task_logs={logs}", "--run=run", "--max_restarts=1", "--restart_backoff_secs=0"]
    command = [sys.executable, "-m", "tfdist", "launch", "local", *flags, str(tmp_path / "script.py"), str(found)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 3
    (secret,) = {each.read_text() for each in found.iterdir()}
    assert len(secret) == 64
    shown = "".join(each.read_text() for each in logs.rglob("*") if each.is_file())
    assert "on command lines: []" in shown
    assert secret not in shown + done.stdout + done.stderr


@pytest.mark.parametrize(
    "flags", [("local",), ("ssh", "--hosts=a,b", "--preflight_secs=0"), ("slurm",)], ids=lambda flags: flags[0]
)
def test_a_dry_run_shows_no_secret(
    flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("TFDIST_JOB_SECRET", "the secret of another job")
    monkeypatch.setattr("secrets.token_hex", lambda count=None: "drawn just now")
    assert cli.main(["launch", *flags, "--dry_run", "-m", "tfdist.doctor"]) == 0
    shown = capsys.readouterr()
    assert "worker" in shown.out or "ntasks" in shown.out
    for secret in ("the secret of another job", "drawn just now"):
        assert secret not in shown.out + shown.err
