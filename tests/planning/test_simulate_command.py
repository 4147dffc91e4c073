# SPDX-License-Identifier: Apache-2.0
"""The command `tfdist simulate`: flags, files, and errors in one line."""

from __future__ import annotations

import json
import pathlib

import numpy as np
import pytest

from tfdist import cli
from tfdist.telemetry import update_log

_FILE = """
cluster:
  workers: 4
  servers: 2
  compute: {distribution: lognormal, mean: 0.2, s: 0.5}
  speeds: {"worker:3": 0.5}
  delays: {"*": constant(secs=0.01)}
  failures: [{secs: 1s, worker: 0, back_after_secs: 1s}]
  network: {bandwidth: 10Gbit, latency_secs: 50us}
model:
  dense_bytes: 100MB
  sparse_tables: [{rows_touched: 100, row_bytes: 256B}]
  step_secs: {32: 0.1, 64: 0.2}
  batch_size: 32
policies: ["BackupWorkers(spares=1)", "Compression('auto')"]
codec: {ratio: 0.1}
num_updates: 20
"""


def test_flags_say_all_and_json_has_the_result(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "new" / "result.json"
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
    assert capsys.readouterr().out == shown


def test_a_file_says_the_same_and_flags_go_before_it(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]):
    file, out = tmp_path / "cluster.yaml", tmp_path / "result.json"
    file.write_text(_FILE)
    assert cli.main(["simulate", f"--file={file}", "--workers=6", "--bandwidth=1Gbit", f"--json={out}"]) == 0
    assert "BackupWorkers(spares=1) + Compression('auto'" in capsys.readouterr().out
    result = json.loads(out.read_text())
    assert (result["replicas"], result["updates"], sum(result["accepted"]), sum(result["lost"])) == (6, 20, 100, 1)


def test_the_update_log_has_each_gradient_and_loss(tmp_path: pathlib.Path):
    file, out = tmp_path / "cluster.yaml", tmp_path / "result.json"
    file.write_text(_FILE)
    assert cli.main(["simulate", f"--file={file}", f"--json={out}", f"--log_dir={tmp_path / 'run'}"]) == 0
    result = json.loads(out.read_text())
    timeline = update_log.read_logs(str(tmp_path / "run"))
    assert timeline.header.simulated and timeline.header.workers == tuple(f"worker:{n}" for n in range(4))
    assert len(timeline.updates) == 20
    assert timeline.updates.time[-1] == pytest.approx(result["seconds"])
    assert timeline.updates.wait.sum() == pytest.approx(result["wait_secs"], rel=1e-5)
    outcomes = [int(np.sum(timeline.contributions.outcome == code)) for code in (0, 1, 2)]
    assert outcomes[0] == sum(result["accepted"]) == 60
    assert outcomes[1] <= sum(result["dropped"])
    assert outcomes[2] == sum(result["lost"]) == 1
    assert [int(kind) for kind in timeline.events.event_kind] == [0, 1]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--nope=1"], "unknown flag --nope (see tfdist simulate --help)"),
        (["train.py"], "tfdist simulate takes flags only; see tfdist simulate --help. Received: 'train.py'"),
        (["--bandwidth=10Gbitt"], "NetworkModel(bandwidth=...) has no known unit; write it like 10Gbit or 1GB/s. "),
        (["--bandwidth=-1Gbit"], "NetworkModel(bandwidth=...) "),
        (["--workers=0"], "ClusterModel(workers=...) must be an integer of at least 1. Received: workers=0"),
        (["--workers=many"], "--workers must be an integer, such as --workers=1. Received: --workers=many"),
        (["--compute=pareto(mean=1, a=1)"], "cluster.compute: pareto(a=...): there is a mean only for a > 1. "),
        (["--compute=lognormal"], "cluster.compute: write a distribution with its parameters, like lognormal(mean=0.2"),
        (["--policies=Backup(1)"], "--policies names no policy; did you mean BackupWorkers?"),
        (["--sparse_table=many"], "--sparse_table: write it like 2000x256B. Received: 'many'"),
        ([], "no step time is known; give "),
        (
            ["--step_secs=1s", "--strategy=multi_worker", "--policies=SoftSync(1)"],
            "policies: SoftSync(updates=1) does ",
        ),
        (["--file=/nonexistent"], "[Errno 2] No such file or directory"),
    ],
)
def test_invalid_values_are_one_line_and_code_2(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["simulate", *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(f"tfdist: {line}")
    assert shown.err.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("cluster: {wokers: 2}", "cluster has no key 'wokers'; use workers, "),
        ("cluster: {network: {speed: 1}}", "cluster.network has no key 'speed'; use bandwidth, "),
        (
            "model: {sparse_tables: [{rows_touched: 2}]}",
            "model.sparse_tables needs row_bytes; add what is missing. Received: ",
        ),
        ("cluster: 3", "cluster must be a mapping"),
        ("cluster: [", "{file} is no YAML: "),
        ("[]", "{file} must have a mapping with the keys cluster and model."),
        ("steps: 3", "unknown key 'steps'; use cluster, "),
    ],
)
def test_an_invalid_file_is_one_line(
    text: str, line: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(text)
    assert cli.main(["simulate", f"--file={file}", "--step_secs=1s"]) == 2
    assert capsys.readouterr().err.startswith(f"tfdist: {line.format(file=file)}")
