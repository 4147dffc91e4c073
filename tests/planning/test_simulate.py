# SPDX-License-Identifier: Apache-2.0
"""The simulator: what holds for all clusters and policies, each engine by itself, and the command."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import pathlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tfdist
from tfdist import cli
from tfdist.planning import simulation
from tfdist.planning.simulation import ClusterModel, ModelProfile, NetworkModel, Result, constant, lognormal, simulate

PARAMETER_SERVER, MULTI_WORKER = "ParameterServerStrategy", "MultiWorkerMirroredStrategy"
_DISTRIBUTIONS = st.sampled_from(
    [constant(0.1), lognormal(0.1, 0.3), lognormal(0.1, 1.0), simulation.pareto(0.1, 2.0), simulation.stalls(0.2, 3)]
)
_NETWORKS = st.builds(
    NetworkModel,
    bandwidth=st.sampled_from(["100Mbit", "1Gbit", "10Gbit", float("inf")]),
    latency_secs=st.sampled_from([0.0, 1e-4, 1e-2]),
    queueing=st.sampled_from([None, "fair", "fifo"]),
)
_MODELS = st.builds(
    ModelProfile,
    dense_bytes=st.sampled_from([0, "1MB", "30MB"]),
    sparse_tables=st.sampled_from([(), (simulation.SparseTable(1000, 256),)]),
    batch_size=st.integers(1, 64),
    update_secs=st.sampled_from([0.0, 0.01]),
)


def _policies(kind: str, workers: int) -> list[Any]:
    if workers < 3:
        return []
    return {
        "none": [],
        "backup": [tfdist.BackupWorkers(spares=1)],
        "warmup": [tfdist.Warmup(steps=2, ramp=True), tfdist.BackupWorkers(spares=1)],
        "soft": [tfdist.SoftSync(2), tfdist.StalenessScaling()],
        "bounded": [tfdist.BoundedStaleness(2), tfdist.SoftSync(2)],
        "drop": [tfdist.DropStale(1)],
        "averaging": [tfdist.ParameterAveraging(every_steps=4)],
    }[kind]


_KINDS = [
    *((PARAMETER_SERVER, kind) for kind in ("none", "backup", "warmup", "soft", "bounded", "drop")),
    *((MULTI_WORKER, kind) for kind in ("none", "backup", "warmup", "averaging")),
]


@settings(max_examples=120, deadline=None)
@given(
    kind=st.sampled_from(_KINDS),
    workers=st.integers(1, 9),
    compute=_DISTRIBUTIONS,
    network=_NETWORKS,
    model=_MODELS,
    failing=st.booleans(),
    seed=st.integers(0, 99),
)
def test_each_gradient_counts_once_and_policies_keep_their_promises(
    kind, workers, compute, network, model, failing, seed
):
    cluster = ClusterModel(
        workers=workers,
        servers=2,
        compute=compute,
        network=network,
        failures=[simulation.Failure(0.3, 0, 1.0), simulation.Failure(2.0, workers - 1, 0.5)] if failing else [],
    )
    policies = _policies(kind[1], workers)
    found = simulate(cluster, model, strategy=kind[0], policies=policies, num_updates=25, seed=seed)
    _check_counts(found)
    if kind[0] == MULTI_WORKER or (policies and kind[1] in ("backup", "warmup")):
        assert set(found.staleness) == {0}
        assert all(len(set(update.contributors)) == len(update.contributors) for update in found.updates)
    if policies and kind[1] == "backup":
        assert {len(update.contributors) for update in found.updates} == {workers - 1}
    if policies and kind[1] == "bounded":
        assert max(found.staleness) <= 2
    if policies and kind[1] == "drop":
        assert max(found.staleness) <= 1
    if policies and kind[1] == "warmup":
        taking_part = [min(workers, 1 + update // 2) for update in range(25)]
        assert [len(update.contributors) for update in found.updates] == [max(1, count - 1) for count in taking_part]
    # A worker alone would have taken as long for the gradients that it computed.
    for replica in range(workers):
        computing = sum(g.computed - g.received for g in found.gradients if g.replica == replica and g.update >= 0)
        assert computing <= found.seconds * (1 + 1e-9)
    assert all(0.0 <= use.utilisation <= 1.0 for use in found.links.values())
    if compute.name == "constant":
        assert found.efficiency <= 1 + 1e-9


def _check_counts(found: Result) -> None:
    """Compares the records of gradients with the updates of the policy."""
    outcomes = collections.Counter((gradient.replica, gradient.outcome) for gradient in found.gradients)
    accepted = collections.Counter(replica for update in found.updates for replica in update.contributors)
    for replica in range(found.replicas):
        assert outcomes[replica, "accepted"] == accepted[replica] == found.accepted[replica]
        assert outcomes[replica, "dropped"] == found.dropped[replica]
        # The same worker computes one gradient at a time.
        own = [gradient for gradient in found.gradients if gradient.replica == replica]
        assert all(one.arrived <= two.started for one, two in itertools.pairwise(own))
    by_update = collections.Counter(gradient.update for gradient in found.gradients if gradient.update >= 0)
    assert [by_update[update.step] for update in found.updates] == [len(each.contributors) for each in found.updates]
    for gradient in found.gradients:
        assert gradient.started <= gradient.received <= gradient.computed
        assert (gradient.update >= 0) == (gradient.outcome == "accepted")
        assert gradient.update < 0 or gradient.staleness == gradient.update - 1 - gradient.local_step


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from([kind for kind in _KINDS if kind[1] in ("none", "backup", "averaging")]),
    workers=st.integers(1, 9),
    compute=st.sampled_from([constant(0.1), lognormal(0.1, 0.3)]),
    factor=st.floats(1.0, 20.0),
    model=_MODELS,
)
def test_more_bandwidth_never_hurts(kind, workers, compute, factor, model):
    def secs(bandwidth: float) -> float:
        network = NetworkModel(bandwidth=bandwidth, latency_secs=1e-4)
        cluster = ClusterModel(workers=workers, servers=2, compute=compute, network=network)
        policies = _policies(kind[1], workers)
        return simulate(cluster, model, strategy=kind[0], policies=policies, num_updates=60).seconds

    # Late gradients may meet another step by chance, so that single updates with spares are not comparable.
    slack = 1.1 if kind[1] == "backup" else 1.02
    assert secs(factor * 20e6) <= slack * secs(20e6)


def test_events_cost_no_more_calls_with_more_workers():
    """Counts the policy's and the links' work by Python's profiler, which no busy machine changes."""

    def calls(workers: int) -> float:
        import sys

        count = 0

        def tick(frame: Any, event: str, argument: Any) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        cluster = ClusterModel(workers=workers, compute=lognormal(0.1, 0.5), network=NetworkModel("10Gbit"))
        policies = [tfdist.SoftSync(4), tfdist.BoundedStaleness(4), tfdist.DropStale(3)]
        previous = sys.getprofile()
        sys.setprofile(tick)
        try:
            found = simulate(cluster, ModelProfile(dense_bytes="1MB"), policies=policies, num_updates=1000)
        finally:
            sys.setprofile(previous)
        # Building the cluster takes calls per worker.
        return (count - 40 * workers) / len(found.gradients)

    assert calls(2000) < 1.5 * calls(20)


def test_the_same_seed_gives_the_same_result_and_another_one_not():
    def again(seed: int) -> Result:
        cluster = ClusterModel(workers=5, compute=lognormal(0.1, 1.0))
        return simulate(cluster, policies=[tfdist.BackupWorkers(spares=1)], num_updates=100, seed=seed)

    assert again(0) == again(0)
    assert again(0).seconds != again(1).seconds


def test_a_lost_worker_takes_its_gradient_along_and_comes_back():
    failures = [simulation.Failure(0.15, 0, 0.5)]
    found = simulate(ClusterModel(workers=3, compute=constant(0.1), failures=failures), num_updates=30)
    assert found.lost == (1, 0, 0)
    assert not [g for g in found.gradients if g.replica == 0 and 0.15 < g.started < 0.65]
    assert found.accepted[0] == pytest.approx(found.accepted[1] - 5, abs=1)


@pytest.mark.parametrize("back_after_secs", [None, 0.5])
def test_an_asynchronous_epoch_ends_before_the_next_begins(back_after_secs: float | None):
    cluster = ClusterModel(workers=2, compute=constant(0.1))
    # The third gradient of an epoch is computed while the other worker waits for the next one.
    assert simulate(cluster, num_updates=12, steps_per_epoch=3).seconds == pytest.approx(4 * 0.2)
    assert simulate(cluster, num_updates=12).seconds == pytest.approx(0.6)
    lossy = dataclasses.replace(cluster, failures=[simulation.Failure(0.15, 0, back_after_secs)])
    found = simulate(lossy, num_updates=12, steps_per_epoch=3)
    assert sum(found.accepted) == 12
    for gradient in found.gradients:
        ended = [time for time in found.times[2::3] if time <= gradient.started]
        assert gradient.update <= 3 * (len(ended) + 1)


def test_short_epochs_of_a_full_link_make_fewer_updates():
    """All workers fetch together when an epoch begins, and only spread out over both directions in the course of it."""
    cluster = ClusterModel(workers=8, servers=2, compute=lognormal(0.4, 0.25), network=NetworkModel("200Mbit"))
    cluster = dataclasses.replace(cluster, network=dataclasses.replace(cluster.network, queueing="fair"))
    model = ModelProfile(dense_bytes="16MB")

    def rate(steps: int) -> float:
        return simulate(cluster, model, num_updates=3200, steps_per_epoch=8 * steps).updates_per_sec

    assert rate(10) < 0.9 * rate(50) < 0.9 * rate(400)


def test_a_collective_waits_for_a_lost_worker_and_fails_if_it_is_gone_for_good():
    def trained(back_after_secs: float | None) -> Result:
        failures = [simulation.Failure(0.15, 2, back_after_secs)]
        cluster = ClusterModel(workers=3, compute=constant(0.1), failures=failures)
        return simulate(cluster, strategy=MULTI_WORKER, policies=[tfdist.BackupWorkers(spares=1)], num_updates=3)

    assert trained(1.0).seconds == pytest.approx(1.15 + 0.1)
    with pytest.raises(RuntimeError, match="no update is due; lost for good: 2"):
        trained(None)


def test_averaging_exchanges_variables_and_slots_once_in_h_steps():
    network = NetworkModel(bandwidth=1e8)
    model = ModelProfile(dense_bytes=1e7, optimizer_bytes=1e7, step_secs=0.1, batch_size=4)
    cluster = ClusterModel(workers=2, network=network)
    policies = [tfdist.ParameterAveraging(every_steps=10)]
    found = simulate(cluster, model, strategy=MULTI_WORKER, policies=policies, num_updates=5)
    assert found.seconds == pytest.approx(5 * 10 * 0.1 + 4 * 2e7 / 1e8)
    assert found.examples_per_sec == pytest.approx(5 * 10 * 4 * 2 / found.seconds)


def test_sparse_models_scale_further_than_dense_ones():
    """Dean et al.: 25 to 40 times on 50 devices for dense models, 300 times on 500 for sparse ones; the ordering."""

    def speedup(model: ModelProfile, workers: int) -> float:
        cluster = ClusterModel(workers=workers, servers=16, compute=lognormal(0.3, 0.2), network=NetworkModel("10Gbit"))
        found = simulate(cluster, model, num_updates=10 * workers)
        return found.examples_per_sec / found.single_examples_per_sec

    dense = ModelProfile(dense_bytes="100MB")
    sparse = ModelProfile(dense_bytes="1MB", sparse_tables=(simulation.SparseTable(5000, 512),))
    assert 25 <= speedup(dense, 50) <= 50
    assert speedup(dense, 500) < 100
    assert speedup(sparse, 500) > 300


def test_compression_needs_the_cost_of_its_codec_and_saves_bytes():
    cluster = ClusterModel(workers=4, compute=constant(0.01), network=NetworkModel(bandwidth="1Gbit"))
    model = ModelProfile(dense_bytes="10MB")
    with pytest.raises(ValueError, match="give both, or none"):
        simulate(cluster, model, policies=[tfdist.Compression("auto")])
    plain = simulate(cluster, model)
    codec = simulation.CodecModel(ratio=0.01, variables_ratio=0.5)
    encoded = simulate(cluster, model, policies=[tfdist.Compression("auto")], codec=codec)
    assert encoded.updates_per_sec > 1.8 * plain.updates_per_sec
    assert encoded.links["to the servers"].bytes_sent == pytest.approx(100 * 1e5, rel=0.05)


def test_slow_workers_and_injected_delays_take_their_time():
    delays = {"worker:1": constant(0.3), "*": constant(0.1)}
    cluster = ClusterModel(workers=3, compute=constant(0.1), speeds={"worker:0": 0.5}, delays=delays)
    found = simulate(cluster, num_updates=200)
    rates = [count / found.seconds for count in found.accepted]
    assert rates == pytest.approx([1 / 0.3, 1 / 0.4, 1 / 0.2], rel=0.05)
    assert found.efficiency == pytest.approx(1.0, rel=0.03)


def test_step_times_are_interpolated_and_scale_the_distribution():
    model = ModelProfile(batch_size=48, step_secs={32: 0.1, 64: "200ms"})
    assert model.mean_step_secs == pytest.approx(0.15)
    assert dataclasses.replace(model, batch_size=96).mean_step_secs == pytest.approx(0.3)
    found = simulate(ClusterModel(workers=1, compute=lognormal(7.0, 0.1)), model, num_updates=400)
    assert found.seconds / 400 == pytest.approx(0.15, rel=0.02)


ANY: Any = simulation


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ANY.ClusterModel(workers=0), "must be an integer of at least 1. Received: 0"),
        (lambda: ANY.ClusterModel(compute=0.1), "such as lognormal.mean=0.2, s=1.0.. Received: 0.1"),
        (lambda: ANY.ClusterModel(speeds={"worker:1": 2.0}), '"worker:0" to "worker:0".* Received: \'worker:1\''),
        (lambda: ANY.ClusterModel(speeds={"*": 0}), "must be a number above 0"),
        (lambda: ANY.ClusterModel(failures=[ANY.Failure(1, 1)]), "of workers 0 to 0"),
        (lambda: ANY.NetworkModel(bandwidth=-1), "must be greater than 0. Received: -1"),
        (lambda: ANY.NetworkModel(bandwidth="10Gbitt"), "no known unit; write it like 10Gbit .* '10Gbitt'"),
        (lambda: ANY.NetworkModel(latency_secs="5"), None),
        (lambda: ANY.NetworkModel(latency_secs=float("nan")), "Received: nan"),
        (lambda: ANY.NetworkModel(queueing="random"), '"fair" or "fifo"'),
        (lambda: ANY.ModelProfile(step_secs={}), "must have a batch size"),
        (lambda: ANY.ModelProfile(overlap=2), "a share from 0 to 1"),
        (lambda: ANY.CodecModel(ratio=0), "must be a number above 0"),
        (lambda: ANY.empirical([]), "must be a list of durations"),
        (lambda: simulate(ClusterModel()), "no step time is known"),
        (lambda: simulate(ClusterModel(compute=constant(1.0)), num_updates=0), "Received: num_updates=0"),
        (lambda: simulate(ClusterModel(servers=0, compute=constant(1.0))), "needs a parameter server"),
        (lambda: simulate(ClusterModel(compute=constant(1.0)), strategy="Other"), "strategy must be one of"),
        (lambda: simulate(ClusterModel(workers=2), strategy="MirroredStrategy"), r"use ClusterModel\(workers=1\)"),
        (
            lambda: simulate(ClusterModel(2, compute=constant(1.0)), policies=[tfdist.Warmup(epochs=1)]),
            "must say how long an epoch is",
        ),
    ],
)
def test_invalid_input_is_one_line_that_names_it(make: Any, message: str | None):
    if message is None:
        assert make().latency_secs == 5.0
        return
    with pytest.raises(ValueError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_overlap_hides_communication_under_the_step_of_the_cluster() -> None:
    # 50 MB over 1 GB/s take 0.075 s on 4 workers, less than a step of 0.1 s.
    cluster = ClusterModel(workers=4, compute=constant(0.1), network=NetworkModel(bandwidth=1e9, latency_secs=0.0))
    model = ModelProfile(dense_bytes=50e6, overlap=1.0)
    found = simulate(cluster, model, strategy="MultiWorkerMirroredStrategy", num_updates=50)
    assert found.updates_per_sec == pytest.approx(10.0, rel=0.02)


def test_latency_of_messages_is_no_computing() -> None:
    cluster = ClusterModel(workers=4, compute=constant(0.1), network=NetworkModel(bandwidth=1e9, latency_secs=1.0))
    found = simulate(cluster, ModelProfile(dense_bytes=4.0), strategy="ParameterServerStrategy", num_updates=40)
    assert (found.computing_share, found.transfer_share) == pytest.approx((0.1 / 2.1, 2 / 2.1), rel=0.05)
    assert found.limit.startswith("transfers: ")


@pytest.mark.parametrize("every_steps", [1, 10])
def test_local_steps_of_averaging_pay_for_their_updates(every_steps: int) -> None:
    cluster = ClusterModel(workers=4, compute=constant(0.1), network=NetworkModel(bandwidth=1e12, latency_secs=0.0))
    model = ModelProfile(dense_bytes=4.0, update_secs=0.05)
    policies = [tfdist.ParameterAveraging(every_steps)]
    found = simulate(cluster, model, strategy="MultiWorkerMirroredStrategy", policies=policies, num_updates=20)
    assert found.updates_per_sec * every_steps == pytest.approx(1 / 0.15, rel=0.02)


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
