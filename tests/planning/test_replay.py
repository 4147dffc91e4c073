# SPDX-License-Identifier: Apache-2.0
"""Replays of runs make as many updates as the runs did, whoever is slow, and advice rests on them."""

from __future__ import annotations

import json
import pathlib
import random

import cluster_log
import pytest

from tfdist import cli
from tfdist.planning import replay
from tfdist.telemetry import update_log
from tfdist.telemetry.update_log import Timeline, read_logs


def write(
    directory: pathlib.Path,
    mean_secs: tuple[float, ...],
    policies: tuple[str, ...] = (),
    examples: int = 0,
    count: int = 120,
) -> Timeline:
    """A synchronous run; one lognormal time for each gradient, and an update that takes a while."""
    names = tuple(f"worker:{index}" for index in range(len(mean_secs)))
    header = update_log.Header("j", "chief:0", names, "MultiWorkerMirroredStrategy", policies)
    writer = update_log.LogWriter(directory / "updates", header)
    draws, now = random.Random(0), 1.0
    for step in range(count):
        secs = [mean * draws.lognormvariate(-0.005, 0.1) for mean in mean_secs]
        gradients = [update_log.Contribution(worker, now, now + own) for worker, own in enumerate(secs)]
        made = now + max(secs)
        writer.add(update_log.UpdateRecord(step + 1, made, max(secs), 0.0, examples * len(secs), 0, gradients))
        now = made + 0.01
    writer.close()
    return read_logs(directory)


def asynchronous(directory: pathlib.Path, mean_secs: tuple[float, ...], count: int = 300) -> Timeline:
    names = tuple(f"worker:{index}" for index in range(len(mean_secs)))
    writer = update_log.LogWriter(
        directory / "updates", update_log.Header("j", "chief:0", names, "ParameterServerStrategy", ())
    )
    draws, starts, due = random.Random(0), [0.0] * len(names), list(mean_secs)
    for step in range(count):
        worker = min(range(len(names)), key=due.__getitem__)
        gradient = update_log.Contribution(worker, starts[worker], due[worker])
        writer.add(update_log.UpdateRecord(step + 1, due[worker], 0.01, 0.0, 32, 0, [gradient]))
        starts[worker] = due[worker] + 0.005
        due[worker] = starts[worker] + mean_secs[worker] * draws.lognormvariate(-0.02, 0.2)
    writer.close()
    return read_logs(directory)


def test_replay_with_a_worker_that_is_always_slow_meets_its_run(tmp_path):
    timeline = write(tmp_path, (0.015, 0.067, 0.014))
    found = replay.advise(timeline)
    assert found.measured == pytest.approx(1 / 0.077, rel=0.03)
    assert found.cases[0].updates_per_sec == pytest.approx(found.measured, rel=0.03)
    # Without it an update takes 15 ms and 10 ms.
    assert found.text.startswith("leave out worker:1: ") and found.text.endswith("% more gradients per second")
    assert found.chosen.updates_per_sec == pytest.approx(1 / 0.026, rel=0.05)
    assert found.chosen.workers == ("worker:2", "worker:0")


def test_asynchronous_replay_with_a_slow_worker_meets_its_run(tmp_path):
    found = replay.advise(asynchronous(tmp_path, (0.02, 0.02, 0.1)))
    assert found.cases[0].updates_per_sec == pytest.approx(found.measured, rel=0.05)
    assert found.text == "keep 3 workers and no policy: nothing that was replayed is faster"


@pytest.mark.parametrize(
    ("spares", "slow", "text"),
    [
        (1, 4.0, "leave out worker:3 and set BackupWorkers(spares=0): same speed"),
        (0, 4.0, "leave out worker:3: "),
        (0, 1.0, "keep 4 workers and BackupWorkers(spares=0): nothing that was replayed is faster"),
        (2, 1.0, "set BackupWorkers(spares=0): "),
    ],
)
def test_advice_tries_combinations_and_names_no_equal_worker(tmp_path, spares, slow, text):
    cluster_log.write(tmp_path / "updates", workers=4, updates=600, spares=spares, slow=slow)
    found = replay.advise(read_logs(tmp_path))
    assert found.text.startswith(text)
    # One worker was lost for a while; what is replayed is the longer time before or after.
    assert found.updates < 500 or not spares
    assert found.cases[0].updates_per_sec == pytest.approx(found.measured, rel=0.15)


def test_replay_of_other_spares_meets_a_run_with_them(tmp_path):
    for spares in (0, 1):
        cluster_log.write(tmp_path / str(spares) / "updates", 3, 600, spares=spares, slow=4.0)
    none, one = (replay.advise(read_logs(tmp_path / str(spares))) for spares in (0, 1))
    (case,) = (each for each in one.cases if each.spares == 0 and len(each.workers) == 3)
    assert case.updates_per_sec == pytest.approx(none.measured, rel=0.15)
    (case,) = (each for each in none.cases if each.spares == 1 and len(each.workers) == 3)
    assert case.updates_per_sec == pytest.approx(one.measured, rel=0.15)


def test_replay_that_misses_its_run_gives_no_advice(tmp_path, capsys):
    # Its header says that updates wait for all, and its updates do not.
    cluster_log.write(tmp_path / "updates", 3, 300, slow=5.0)
    path = tmp_path / "updates" / "log.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "policies": ["BackupWorkers(spares=0)"]}))
    assert cli.main(["advise", str(tmp_path)]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("no advice: the replay makes 1.96") and line.endswith("updates/s where the run made 8.58")


@pytest.mark.parametrize(
    ("policies", "count", "reason"),
    [
        ((), 20, "no advice: 18 updates on the same workers, and 30 are needed; train longer"),
        (("ParameterAveraging(every_steps=4)",), 60, "no advice: with ParameterAveraging no update is made of"),
        (("Mine()",), 60, "no advice: policies names no policy; "),
    ],
)
def test_run_that_can_not_be_replayed_is_one_line(tmp_path, policies, count, reason):
    timeline = write(tmp_path, (0.1, 0.1), policies, count=count)
    with pytest.raises(replay.ReplayError) as raised:
        replay.advise(timeline)
    assert str(raised.value).startswith(reason) and "\n" not in str(raised.value)


# The command.


def test_advise_of_a_run_says_batches_where_examples_are_unknown(tmp_path, capsys):
    write(tmp_path, (0.015, 0.067, 0.014))
    assert cli.main(["advise", str(tmp_path), "--workers=1,2,3", f"--json={tmp_path / 'a.json'}"]) == 0
    shown = capsys.readouterr().out
    assert "batches/s" in shown and "examples" not in shown
    given = json.loads((tmp_path / "a.json").read_text())
    assert given["unit"] == "batches/s" and given["rows"][0]["updates_per_sec"] == pytest.approx(13.0, rel=0.03)
    assert {row["workers"] for row in given["rows"]} == {1, 2, 3}
    assert given["rows"][given["recommended"]]["workers"] == 2
    assert given["recommendation"] in shown


def test_advise_of_a_run_counts_its_examples(tmp_path, capsys):
    write(tmp_path, (0.1, 0.1), examples=32)
    assert cli.main(["advise", str(tmp_path), "--examples=1e6", "--price_per_hour=3"]) == 0
    shown = capsys.readouterr().out
    assert "\n32 examples a step\n" in shown and "examples/s" in shown and "price" in shown


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--workers=8"], "--workers: the run had 2 workers, and a log does not say what more would send"),
        (["--network=1Gbit"], "--network is for profiles: a run is replayed on its own workers and links"),
        (["--examples=1e6"], "--examples: the log of this run does not say how many examples a batch has"),
    ],
)
def test_flag_that_a_run_can_not_answer_is_refused(tmp_path, capsys, arguments, line):
    write(tmp_path, (0.1, 0.1))
    assert cli.main(["advise", str(tmp_path), *arguments]) == 2
    shown = capsys.readouterr()
    assert line in shown.err and shown.err.count("\n") == 1 and shown.out == ""


def test_directory_without_a_log_is_one_line(tmp_path, capsys):
    assert cli.main(["advise", str(tmp_path)]) == 2
    assert "there is no update log below" in capsys.readouterr().err
