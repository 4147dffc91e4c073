# SPDX-License-Identifier: Apache-2.0
"""tfdist advise: recommendations in words, intervals, limits, flags with dashes, and a line for each invalid value."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib

import profiles
import pytest

from tfdist import cli
from tfdist.doctor import measure as doctor_measure
from tfdist.planning import advice, candidates, prediction
from tfdist.planning.profile import NoiseScale, Profile, Table
from tfdist.telemetry import update_log

NETWORK = prediction.from_flag("10Gbit", None, has_accelerators=True)
LOCAL = prediction.from_flag("local", None, has_accelerators=False)
RESNET = profiles.make(0.25, 102_000_000)


def ask(measured: Profile, links: prediction.Network = NETWORK, workers: tuple[int, ...] = (1, 2, 8), **question):
    found = advice.rows(measured, links, advice.Question(workers, **question))
    chosen = advice.recommended(found)
    return found, chosen, "\n".join(advice.in_words(found, chosen, measured))


def write(tmp_path: pathlib.Path, measured: Profile = RESNET) -> str:
    path = tmp_path / "profile.json"
    path.write_text(measured.to_json())
    return str(path)


def test_a_small_dense_model_is_not_distributed():
    _, chosen, words = ask(profiles.make(0.002, 4_000_000, device="CPU"), prediction.from_flag("1Gbit", None, False))
    assert chosen.candidate is None
    assert words.startswith("do not distribute: one device is faster")


def test_a_model_that_computes_for_long_is_distributed_synchronously():
    _, chosen, words = ask(RESNET)
    assert chosen.workers == 8 and chosen.candidate.is_exact
    assert words.startswith("use 8 workers: ")
    assert "\nwrite tfdist.MultiWorkerMirroredStrategy()\n" in words


def test_stragglers_are_answered_with_spares():
    _, chosen, words = ask(profiles.make(0.2, 1_000_000, s=0.6), workers=(16,))
    assert chosen.candidate.spares >= 2
    assert f"BackupWorkers(spares={chosen.candidate.spares})" in words


def test_more_workers_are_compared_by_what_would_be_recommended_for_them():
    found, chosen, words = ask(profiles.make(0.2, 1_000_000, s=0.6, device="CPU"), LOCAL, (2, 4), workers_per_machine=4)
    assert chosen.workers == 2
    (row,) = (row for row in found if row.candidate and row.candidate.label == "1 spare" and row.candidate.servers == 0)
    ratio = row.prediction.examples_per_sec / chosen.prediction.examples_per_sec
    assert f"\n4 workers would be {ratio:.1f} times as fast as 2: {row.limit.words}" in words


def test_a_noise_scale_below_the_batch_keeps_the_batch_small():
    noise = NoiseScale(20.0, 15.0, 30.0, 16)
    _, chosen, words = ask(profiles.make(0.25, 102_000_000, noise_scale=noise), workers=(2, 64))
    assert chosen.workers < 64, words


def test_throughput_and_bandwidth_have_bounds():
    slow, fast = (prediction.from_flag(each, None, True) for each in ("1Gbit", "10Gbit"))
    for workers in (2, 8):
        for candidate in candidates.all_for(workers, RESNET.samples, True):
            less, more = (prediction.predict(RESNET, each, candidate) for each in (slow, fast))
            assert less.examples_per_sec <= 1.001 * more.examples_per_sec
            assert more.low <= more.examples_per_sec <= more.high
            # Never more than N times one device, but for a better draw of the measured times.
            assert more.efficiency <= 1.05


def test_the_limit_says_from_how_many_workers_the_servers_are_full():
    candidate = next(each for each in candidates.all_for(8, RESNET.samples, True) if each.servers == 1)
    workers = advice.full_from(RESNET, NETWORK, candidate)
    # A cycle of one worker, 0.25 s and two transfers of 102 MB, against a transfer of 102 MB.
    assert workers == math.ceil((sum(RESNET.samples) / 100 + 2 * 0.0816) / 0.0816)
    predicted = prediction.predict(RESNET, NETWORK, candidate)
    assert (
        advice.limit_of(RESNET, NETWORK, candidate, predicted).words
        == f"the server's link is full from {workers} workers on"
    )
    # Beyond it no worker brings anything.
    more = next(each for each in candidates.all_for(16, RESNET.samples, True) if each.servers == 1)
    assert prediction.predict(RESNET, NETWORK, more).examples_per_sec < 1.15 * predicted.examples_per_sec


def test_sparse_rows_are_sent_instead_of_tables():
    table = Table("embeddings", 10_000_000, 256, 5000.0)
    sparse = profiles.make(0.1, 1_000_000, tables=(table,), trainable_bytes=2_561_000_000)
    dense = profiles.make(0.1, 2_561_000_000)
    candidate = next(each for each in candidates.all_for(8, sparse.samples, True) if each.servers == 2)
    found = [prediction.predict(each, NETWORK, candidate).examples_per_sec for each in (sparse, dense)]
    assert found[0] > 10 * found[1]


def test_costs_count_the_machines_of_the_servers_too():
    found, _, _ = ask(RESNET, examples=1e6, price_per_hour=3.6)
    assert found[0].cost.value == pytest.approx(found[0].secs.value * 1e-3)
    served = next(row for row in found if row.candidate and row.candidate.servers == 2)
    assert served.cost.value == pytest.approx(served.secs.value * 1e-3 * (8 + 2))
    assert served.secs.low < served.secs.value < served.secs.high


def test_a_fixed_global_batch_shares_out_the_examples():
    found, _, _ = ask(RESNET, workers=(1, 2), global_batch=64)
    synchronous = next(row for row in found if row.candidate and row.candidate.label == "synchronous")
    assert synchronous.prediction.global_batch == pytest.approx(64)


def test_the_model_of_statistical_efficiency_is_that_of_the_paper():
    noise = NoiseScale(1000.0, 500.0, 2000.0, 8)
    factor = advice.examples_factor(noise, batch=1000, reference=0)
    assert factor.value == pytest.approx(2.0)  # E / E_min at the critical batch size
    assert factor.low == pytest.approx(1.5) and factor.high == pytest.approx(3.0)
    assert advice.staleness_factor(0).high == pytest.approx(1.0)
    assert advice.staleness_factor(1).high == pytest.approx(2.0)  # 1 / sin(pi / 6)


@pytest.mark.parametrize("price", [["--price-per-hour=3"], ["--price_per_hour=3"], ["--price-per-hour", "3"]])
def test_flags_may_have_dashes_and_stand_behind_the_profile(tmp_path, capsys, price):
    output, picture = tmp_path / "advice.json", tmp_path / "advice.png"
    options = ["--workers=1,2,4", "--network=10Gbit", "--examples=1e6", f"--json={output}", f"--plot={picture}"]
    assert cli.main(["advise", write(tmp_path), *options, *price]) == 0
    shown = capsys.readouterr().out
    assert "\nrecommendation: use 4 workers" in shown and "cost" in shown and ", and cost " in shown
    given = json.loads(output.read_text())
    assert (given["format"], given["version"]) == ("tfdist advice", 1)
    assert given["rows"][given["recommended"]]["workers"] == 4
    assert given["recommendation"] in shown
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_measured_network_is_taken_from_a_file(tmp_path, capsys):
    links = tmp_path / "network.json"
    links.write_text(doctor_measure.to_json([doctor_measure.MeasuredLink("worker:0", "worker:1", 1.25e7, 1e-4)]))
    assert cli.main(["advise", write(tmp_path), "--workers=2", f"--network={links}"]) == 0
    shown = capsys.readouterr().out
    assert "network: 1 measured links, the slowest 0.1 Gbit/s, 100 us" in shown
    assert "do not distribute" in shown


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--workers=0"], "--workers must be integers from 1 to 10000, such as 1,2,4,8. Received: '0'"),
        (["--workers=two"], "--workers must be integers"),
        (["--network=10Gbut"], "--network has no known unit; write it like 10Gbit or 1GB/s. Received: '10Gbut'"),
        (["--network=-10Gbit"], "--network"),
        (["--network=0Gbit"], "--network must be greater than 0"),
        (["--network=none.json"], "--network: can't read none.json"),
        (["--latency=5lightyears"], "--latency has no known unit"),
        (["--price-per-hour=3"], "--price-per-hour needs --examples"),
        (["--price_per_hour=-3"], "price_per_hour"),
        (["--examples=inf"], "--examples must be a finite number"),
        (["--no-such-flag=1"], "unknown flag --no-such-flag"),
        (["another.json"], "give one profile"),
    ],
)
def test_an_invalid_flag_is_one_line(tmp_path, capsys, arguments, line):
    assert cli.main(["advise", write(tmp_path), *arguments]) == 2
    shown = capsys.readouterr()
    assert line in shown.err and shown.err.count("\n") == 1 and shown.out == ""


@pytest.mark.parametrize("text", ["", "{}", '{"format": "tfdist profile", "version": 0}'])
def test_a_foreign_profile_is_one_line(tmp_path, capsys, text):
    (tmp_path / "profile.json").write_text(text)
    assert cli.main(["advise", str(tmp_path / "profile.json")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert cli.main(["advise", str(tmp_path / "absent.json")]) == 2
    assert "can't read the profile" in capsys.readouterr().err


def write_log(tmp_path, secs=(0.1, 0.1)):
    header = update_log.Header(job="j", writer="chief:0", workers=("worker:0", "worker:1"), strategy="S", policies=())
    writer = update_log.LogWriter(tmp_path / "updates", header)
    for step in range(40):
        time = 1.0 + max(secs) * step
        gradients = [update_log.Contribution(worker, time, time + own) for worker, own in enumerate(secs)]
        writer.add(update_log.UpdateRecord(step + 1, time + max(secs), 0.1, 0.0, 64, 0, gradients))
    writer.close()


def test_an_update_log_serves_as_a_profile(tmp_path, capsys):
    write_log(tmp_path)
    assert cli.main(["advise", str(tmp_path), "--workers=1,2"]) == 0
    assert "32 examples a step" in capsys.readouterr().out


def test_one_device_is_the_fastest_worker_of_a_log(tmp_path, capsys):
    write_log(tmp_path, secs=(0.1, 0.3))
    assert (
        cli.main(["advise", str(tmp_path), "--workers=1,2", "--network=10Gbit", f"--json={tmp_path / 'a.json'}"]) == 0
    )
    assert "one device: worker:0, the fastest, 100 ms a step; mean of all 200 ms" in capsys.readouterr().out
    rows = json.loads((tmp_path / "a.json").read_text())["rows"]
    assert rows[0]["examples_per_sec"] == pytest.approx(320)
    assert all(row["efficiency"] <= 1 or "above 100 %" in row["limit"] for row in rows)


@pytest.mark.parametrize("s", [0.05, 0.5, 1.5])
def test_an_efficiency_above_one_has_a_reason(s):
    found, _, _ = ask(profiles.make(0.2, 1_000_000, s=s), workers=(2, 8, 16))
    for row in found:
        assert row.prediction.efficiency <= 1 or (row.candidate.spares and "above 100 %" in row.limit.words)


@pytest.mark.parametrize("used", [0.1, 1.0, 2.0])
def test_workers_of_a_machine_share_its_cores(used):
    secs = 0.2
    alone = profiles.make(secs, 1_000, device="CPU")
    measured = dataclasses.replace(alone, fit_secs=alone.steps[1].secs, cores=2, cpu_secs=used * secs)
    found, _, _ = ask(measured, prediction.from_flag("local", None, False), workers=(4,), workers_per_machine=4)
    synchronous = next(row for row in found if row.candidate and row.candidate.label == "synchronous")
    slower = max(1.0, 4 * measured.used_cores / 2)
    ratio = synchronous.prediction.examples_per_sec / found[0].prediction.examples_per_sec
    assert ratio * slower == pytest.approx(4, rel=0.25)
    assert (synchronous.limit.short == "shared cores") == (used > 0.5)


def test_the_local_machine_is_recognised_and_said(tmp_path, capsys):
    links = tmp_path / "network.json"
    link = doctor_measure.MeasuredLink("worker:0", "worker:1", 1.25e9, 1e-5)
    links.write_text(doctor_measure.to_json([link], is_one_machine=True))
    measured = dataclasses.replace(RESNET, fit_secs=RESNET.steps[1].secs, cores=2, cpu_secs=0.25)
    for given in ("local", str(links)):
        assert cli.main(["advise", write(tmp_path, measured), "--workers=1,4", f"--network={given}"]) == 0
        assert (
            "machine: 2 cores, of which a step uses 1.0; 4 workers on it take 2.0 times as long"
            in capsys.readouterr().out
        )
    assert cli.main(["advise", write(tmp_path), "--workers=1,4", "--workers_per_machine=2"]) == 0
    assert "up to 2 workers; the profile does not say how many cores a step uses" in capsys.readouterr().out


@pytest.mark.parametrize(("columns", "name"), [(80, "limit"), (100, "90 % interval")])
@pytest.mark.parametrize("secs", [0.002, 0.25])
def test_the_output_fits_the_terminal(tmp_path, capsys, monkeypatch, columns, name, secs):
    monkeypatch.setenv("COLUMNS", str(columns))
    noise = NoiseScale(500.0, 0.0, math.inf, 8)
    path = write(tmp_path, profiles.make(secs, 102_000_000, s=0.5, noise_scale=noise, script="train.py"))
    assert cli.main(["advise", path, "--all"]) == 0
    shown = capsys.readouterr().out
    table, _, advice_lines = shown.partition("\nrecommendation: ")
    assert max(map(len, table.splitlines())) <= columns
    assert name in table and "\u2026" not in table
    assert len(advice_lines.splitlines()[0]) <= 84
    assert max(map(len, advice_lines.splitlines())) <= 100
    # An interval from 0 to infinity says nothing.
    assert "noise scale" not in shown and "to a loss" not in shown


def test_a_directory_without_a_log_is_one_line(tmp_path, capsys):
    assert cli.main(["advise", str(tmp_path)]) == 2
    assert "has no update log" in capsys.readouterr().err
