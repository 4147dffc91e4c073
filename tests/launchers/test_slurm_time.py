# SPDX-License-Identifier: Apache-2.0
"""Time limits in Slurm's formats, and those that leave a job no time."""

import pytest

from tfdist.launchers import requests
from tfdist.launchers.slurm import job as slurm_job
from tfdist.launchers.slurm import launcher as slurm


@pytest.mark.parametrize(
    ("limit", "secs"),
    [
        *(("2", 120), ("0:30", 60), ("90:01", 91 * 60), ("1:02:03", 63 * 60), ("1-2", 26 * 3600)),
        *(("1-2:03", 26 * 3600 + 180), ("1-2:03:04", 26 * 3600 + 240), (" 5 ", 300)),
        *((text, None) for text in ("UNLIMITED", "-1", "INFINITE", "0", "", "soon", "1:2:3:4")),
    ],
)
def test_time_limits_are_read_as_slurm_does(limit, secs):
    assert slurm_job.secs_of_limit(limit) == secs


@pytest.mark.parametrize(
    ("time", "extra", "env", "shown"),
    [
        ("2", (), {}, "--time=2 (120 s) with --pre_kill_secs=120"),
        ("0-00:02", (), {}, "--time=0-00:02 (120 s)"),
        ("4:00:00", ("--time=1:30",), {}, "--sbatch=--time=1:30 (120 s)"),
        ("", ("--exclusive", "-t 2"), {}, "--sbatch=-t 2 (120 s)"),
        ("4:00:00", (), {"SBATCH_TIMELIMIT": "1"}, "SBATCH_TIMELIMIT=1 (60 s)"),
    ],
)
def test_time_limit_within_pre_kill_secs_is_refused(time, extra, env, shown, monkeypatch):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(requests.LaunchError, match="--time is not longer than --pre_kill_secs") as caught:
        slurm.SlurmJob(("train.py",), time=time, sbatch=extra)
    assert shown in str(caught.value)
    slurm.SlurmJob(("train.py",), time=time, sbatch=extra, pre_kill_secs=0)
