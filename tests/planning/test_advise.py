# SPDX-License-Identifier: Apache-2.0
"""tfdist advise of a profile: recommendations in words, costs, flags with dashes, and a line for each invalid value."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib

import profiles
import pytest

from tfdist import cli
from tfdist.doctor import measure as doctor_measure
from tfdist.planning import advise, prediction
from tfdist.planning.profile import NoiseScale, Profile, Table

NETWORK = prediction.from_flag("10Gbit", None, has_accelerators=True)
LOCAL = prediction.from_flag("local", None, has_accelerators=False)
RESNET = profiles.make(0.25, 102_000_000)


def ask(measured: Profile, links: prediction.Network = NETWORK, workers: tuple[int, ...] = (1, 2, 8), **given):
    most_cost = given.pop("most_cost", advise.MOST_COST)
    found = advise.rows(measured, links, workers, **given)
    chosen = advise.recommended(found, measured, most_cost)
    return found, chosen, "\n".join(advise.in_words(found, chosen, measured, most_cost))


def write(tmp_path: pathlib.Path, measured: Profile = RESNET) -> str:
    path = tmp_path / "profile.json"
    path.write_text(measured.to_json())
    return str(path)


def test_a_small_dense_model_is_not_distributed():
    _, chosen, words = ask(profiles.make(0.002, 4_000_000, device="CPU"), prediction.from_flag("1Gbit", None, False))
    assert chosen.setting.workers == 1
    assert words.startswith("do not distribute: one device is faster")


def test_a_model_that_computes_for_long_is_distributed_synchronously():
    _, chosen, words = ask(RESNET)
    assert chosen.setting.workers == 8 and chosen.setting.is_exact
    assert words.startswith("use 8 workers: ")
    assert "\nwrite tfdist.MultiWorkerMirroredStrategy()\n" in words


def test_stragglers_are_answered_with_spares():
    _, chosen, words = ask(profiles.make(0.2, 1_000_000, s=0.6), workers=(16,), most_cost=3.0)
    assert chosen.setting.code.startswith("BackupWorkers(spares=") and chosen.setting.code in words
    assert int(chosen.setting.code[-2]) >= 2


@pytest.mark.parametrize("kind", [{}, {"cores": 2, "cpu_secs": 0.006}])
def test_small_model_is_not_distributed_at_twice_the_cost(kind):
    measured = profiles.make(0.006, 16_000, device="CPU", **kind)
    links = prediction.from_flag("10Gbit", None, False)
    found, chosen, words = ask(measured, links)
    assert chosen is found[0] and words.startswith("do not distribute: 8 workers make ")
    assert "--any_cost recommends settings of more than 2 times the cost, too" in words
    _, dearer, words = ask(measured, links, most_cost=math.inf)
    assert dearer.setting.workers == 8 and dearer.cost > 2
    assert f"{dearer.cost:.1f} times the machine-hours of an example" in words


def test_machines_of_a_cluster_and_of_one_machine_are_counted():
    rows = {row.setting: row for row in ask(RESNET)[0]}
    served = next(row for row in rows.values() if row.setting.servers == 2)
    single = ask(RESNET)[0][0].examples_per_sec
    assert served.cost == pytest.approx((8 + 2) * single / served.examples_per_sec)
    assert served.machines == pytest.approx(10)
    on_one, _, _ = ask(RESNET, LOCAL, workers_per_machine=8)
    assert all(row.machines == pytest.approx(1) for row in on_one)


def test_a_noise_scale_below_the_batch_keeps_the_batch_small():
    noise = NoiseScale(20.0, 15.0, 30.0)
    _, chosen, words = ask(profiles.make(0.25, 102_000_000, noise_scale=noise), workers=(2, 64))
    assert chosen.setting.workers < 64, words


def test_sparse_rows_are_sent_instead_of_tables():
    table = Table("embeddings", 10_000_000, 256, 5000.0)
    sparse = profiles.make(0.1, 1_000_000, tables=(table,), trainable_bytes=2_561_000_000)
    dense = profiles.make(0.1, 2_561_000_000)
    found = [
        next(row for row in ask(each, workers=(8,))[0] if row.setting.servers == 2).examples_per_sec
        for each in (sparse, dense)
    ]
    assert found[0] > 10 * found[1]


def test_a_fixed_global_batch_shares_out_the_examples():
    found, _, _ = ask(RESNET, workers=(1, 2), global_batch=64)
    synchronous = next(row for row in found if row.setting.label == "synchronous")
    assert synchronous.examples_per_sec / synchronous.updates_per_sec == pytest.approx(64)


@pytest.mark.parametrize("price", [["--price-per-hour=3"], ["--price_per_hour=3"], ["--price-per-hour", "3"]])
def test_flags_may_have_dashes_and_stand_behind_the_profile(tmp_path, capsys, price):
    output = tmp_path / "advice.json"
    options = ["--workers=1,2,4", "--network=10Gbit", "--examples=1e6", f"--json={output}"]
    assert cli.main(["advise", write(tmp_path), *options, *price]) == 0
    shown = capsys.readouterr().out
    assert "\nrecommendation: use 4 workers" in shown and " time " in shown and " price " in shown
    given = json.loads(output.read_text())
    assert (given["format"], given["version"]) == ("tfdist advice", 2)
    assert given["rows"][given["recommended"]]["workers"] == 4
    assert given["recommendation"] in shown


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
        (["--network=10"], "--network has no known unit; write it like 10Gbit or 1GB/s. Received: '10'"),
        (["--latency=50"], "--latency has no known unit; write it like 50us or 0.1s. Received: '50'"),
        (["--network=0Gbit"], "--network must be greater than 0"),
        (["--network=none.json"], "--network can't be read: No such file or directory; write it with tfdist doctor"),
        (["--price-per-hour=3"], "--price-per-hour needs --examples"),
        (["--price_per_hour=-3"], "price_per_hour"),
    ],
)
def test_an_invalid_flag_is_one_line(tmp_path, capsys, arguments, line):
    assert cli.main(["advise", write(tmp_path), *arguments]) == 2
    shown = capsys.readouterr()
    assert line in shown.err and shown.err.count("\n") == 1 and shown.out == ""


def test_a_foreign_profile_is_one_line(tmp_path, capsys):
    (tmp_path / "profile.json").write_text("{}")
    assert cli.main(["advise", str(tmp_path / "profile.json")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert cli.main(["advise", str(tmp_path / "absent.json")]) == 2
    assert "the profile can't be read: No such file or directory; write one" in capsys.readouterr().err


@pytest.mark.parametrize("used", [0.1, 1.0, 2.0])
def test_workers_of_a_machine_share_its_cores(used):
    secs = 0.2
    alone = profiles.make(secs, 1_000, device="CPU")
    measured = dataclasses.replace(alone, fit_secs=alone.steps[1].secs, cores=2, cpu_secs=used * secs)
    found, _, _ = ask(measured, LOCAL, workers=(4,), workers_per_machine=4)
    synchronous = next(row for row in found if row.setting.label == "synchronous")
    slower = max(1.0, 4 * measured.used_cores / 2)
    ratio = synchronous.examples_per_sec / found[0].examples_per_sec
    assert ratio * slower == pytest.approx(4, rel=0.25)
    assert synchronous.limit.startswith("shared cores: ") == (used > 0.5)


def test_asynchronous_epochs_wait_for_their_last_steps():
    measured, strategy = profiles.make(0.2, 1_000, s=0.25, device="CPU"), "ParameterServerStrategy"
    given = {"workers": 8, "workers_per_machine": 8, "num_updates": 3840}
    runs = [prediction.simulate(measured, LOCAL, strategy, [], **given, steps_per_epoch=n) for n in (192, 0)]
    assert 0.95 < runs[0].updates_per_sec / runs[1].updates_per_sec < 0.99


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


def test_what_can_not_be_said_is_left_out_and_the_table_fits(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    wide = NoiseScale(500.0, 1.0, 1e6)
    for noise, is_said in ((wide, False), (NoiseScale(500.0, 400.0, 600.0), True)):
        path = write(tmp_path, profiles.make(0.25, 102_000_000, s=0.5, noise_scale=noise, script="train.py"))
        assert cli.main(["advise", path, "--all"]) == 0
        shown = capsys.readouterr().out
        assert ("gradient noise scale 500 examples (400 to 600)" in shown) == is_said
        assert ("noise scale" in shown) == is_said and " inf" not in shown
        # Code stays in one piece.
        lines = [each for each in shown.splitlines() if not each.startswith("- write ")]
        assert max(map(len, lines)) <= 100 and "\u2026" not in shown
