# SPDX-License-Identifier: Apache-2.0
"""The command `tfdist simulate`: flags, files, and errors in one line."""

from __future__ import annotations

import json
import pathlib

import pytest

from tfdist import cli


def test_flags_say_all_and_json_has_the_result(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "result.json"
    arguments = [
        *("--workers=4", "--servers=2", "--step_secs=100ms", "--batch_size=8", "--dense_bytes=10MB"),
        *("--sparse_table=1000x256B", "--bandwidth=1Gbit", "--latency_secs=50us", "--policies=SoftSync(2)"),
        *("--num_updates=50", f"--json={out}"),
    ]
    assert cli.main(["simulate", *arguments]) == 0
    shown = capsys.readouterr().out
    assert "ParameterServerStrategy + SoftSync(updates=2)" in shown
    assert all(len(line) < 120 for line in shown.splitlines())
    result = json.loads(out.read_text())
    assert (result["updates"], sum(result["accepted"])) == (50, 100)
    assert result["updates_per_sec"] == pytest.approx(50 / result["seconds"])
    assert set(result["links"]) == {"from the servers", "to the servers"}
    assert cli.main(["simulate", *arguments]) == 0
    assert capsys.readouterr() == (shown, "")
    assert cli.main(["simulate", "--step_secs=1s"]) == 0
    assert capsys.readouterr().err.startswith("tfdist: simulated is ParameterServerStrategy with one parameter server;")


def test_codec_and_distribution_are_written_as_calls(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "result.json"
    arguments = ["--workers=6", "--servers=2", "--compute=lognormal(mean=0.2, s=0.5)", "--dense_bytes=100MB"]
    arguments += ["--bandwidth=1Gbit", "--policies=BackupWorkers(spares=1)", "--policies=Compression('auto')"]
    assert cli.main(["simulate", *arguments, "--codec=CodecModel(ratio=0.1)", "--num_updates=20", f"--json={out}"]) == 0
    assert "BackupWorkers(spares=1) + Compression('auto'" in capsys.readouterr().out
    result = json.loads(out.read_text())
    assert (result["replicas"], result["updates"], sum(result["accepted"])) == (6, 20, 100)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--bandwidth=10Gbitt"], "--bandwidth has no known unit; write it like 10Gbit or 1GB/s. "),
        (["--bandwidth=1Gbit"], "--bandwidth has no effect without bytes to send; add --dense_bytes=100MB. "),
        (["--workers=0"], "--workers must be a positive integer, such as --workers=1. Received: --workers=0"),
        (["--compute=pareto(mean=1, a=1)"], "--compute=pareto(mean=1, a=1): pareto(a=...): there is a mean only"),
        (["--compute=lognormal"], "--compute must be lognormal(mean, s); write --compute='lognormal(mean=0.2, s=1.0)'"),
        (
            ["--compute=0.3"],
            "--compute is no distribution with plain arguments; write it as --compute='lognormal(mean=0.2, s=1",
        ),
        (["--policies=Backup(1)"], "--policies names no policy; did you mean BackupWorkers?"),
        (["--sparse_table=many"], "--sparse_table: write it like 2000x256B. Received: 'many'"),
        ([], "no step time is known; add --step_secs=100ms, or --compute='constant(secs=0.1)'. Rec"),
        (["--step_secs=1s", "--strategy=multi_worker", "--policies=SoftSync(1)"], "policies: SoftSync(updates=1) does"),
        (["--codec=0.5"], "--codec is no codec with plain arguments; write it as --codec='Codec"),
        (["--codec=CodecModel(speed=3)"], "--codec must be CodecModel(ratio"),
        (
            ["--workers=2", "--step_secs=1s", "--strategy=mirrored"],
            "MirroredStrategy trains on the devices of one worker; use --workers=1 and --devices_per_worker=2. ",
        ),
        (["--step_secs=1s", "--servers=2", "--strategy=multi_worker"], "--servers has no effect here; leave it out"),
        (["--step_secs=1s", "--overlap=0.5"], "--overlap has no effect here; leave it out"),
        (["--step_secs=1s", "--compute=constant(secs=1)"], "--compute is the time of a step already; leave"),
        (["--step_secs=1s", "--num_updates=100000000", "--json=/dev/null/a"], "--json: the file can't be written (Not"),
    ],
)
def test_invalid_values_are_one_line_and_code_2(arguments, line, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["simulate", *arguments]) == 2
    assert list(tmp_path.iterdir()) == []
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(f"tfdist: {line}")
    assert shown.err.count("\n") == 1
