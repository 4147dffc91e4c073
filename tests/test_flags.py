# SPDX-License-Identifier: Apache-2.0
"""Flags: a strategy from text, nothing at import, and whatever is wrong with them in one line."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys

import pytest
from absl import flags
from hypothesis import example, given, settings
from hypothesis import strategies as st

import tfdist
from tfdist import flags as tfdist_flags


def values(*arguments):
    found = flags.FlagValues()
    tfdist_flags.define_flags(found)
    found(["program", *arguments])
    return found


def test_importing_defines_nothing():
    code = "from absl import flags; import tfdist.flags, sys; sys.exit(any('tfdist' in f for f in flags.FLAGS))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_defining_twice_is_defining_once():
    found = values()
    tfdist_flags.define_flags(found)
    assert all(name.startswith("tfdist_") for name in found if len(name) > 1)


@pytest.mark.parametrize(
    "make", [tfdist.strategy_from_flags, tfdist_flags.policies_from_flags, tfdist_flags.callbacks_from_flags]
)
def test_flags_that_are_not_ready(make):
    empty = flags.FlagValues()
    with pytest.raises(ValueError, match=r"the flags are not defined; call tfdist\.flags\.define_flags\(\)"):
        make(empty)
    tfdist_flags.define_flags(empty)
    with pytest.raises(ValueError, match=r"the flags are not parsed; use absl\.app\.run\(main\)"):
        make(empty)


# Policies.


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("BackupWorkers(spares=1)", "BackupWorkers(spares=1)"),
        (" BackupWorkers(1) ", "BackupWorkers(spares=1)"),
        ("BackupWorkers(spares='auto')", "BackupWorkers(spares='auto')"),
        ("Warmup(epochs=1)", "Warmup(epochs=1)"),
        ("Warmup(steps=10, ramp=True)", "Warmup(steps=10, ramp=True)"),
        ("SoftSync(4)", "SoftSync(updates=4)"),
        ("tfdist.SoftSync(4)", "SoftSync(updates=4)"),
        ("DropStale(max_staleness=3)", "DropStale(max_staleness=3)"),
        ("BoundedStaleness(bound=2)", "BoundedStaleness(bound=2)"),
        ("ParameterAveraging(every_steps=8)", "ParameterAveraging(every_steps=8"),
        ("StalenessScaling", "StalenessScaling("),
        ("StalenessScaling()", "StalenessScaling("),
    ],
)
def test_every_policy_can_be_written(text, shown):
    assert repr(tfdist_flags.parse_policy(text)).startswith(shown)


def test_no_policy_is_forgotten():
    homes = {name for name, home in tfdist.MODULE_OF.items() if "policies" in home}
    with pytest.raises(ValueError, match="names no policy") as raised:
        tfdist_flags.parse_policy("Unlike()")
    named = re.search("use one of (.*?) Received", str(raised.value))
    assert named and set(named[1].rstrip(".").split(", ")) == homes
    assert "BackupWorkers" in homes


def test_policies_keep_their_order():
    found = values("--tfdist_policies=Warmup(epochs=1)", "--tfdist_policies=BackupWorkers(spares=1)")
    assert [type(policy).__name__ for policy in tfdist_flags.policies_from_flags(found)] == ["Warmup", "BackupWorkers"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "--tfdist_policies is no policy with plain arguments; write it as --tfdist_policies='Warmup(epochs=1)'"),
        ("[SoftSync(4)]", "--tfdist_policies is no policy with plain arguments; write it as"),
        ("Warmup(epochs=", "--tfdist_policies is no policy with plain arguments"),
        ("Warmup(**{})", "--tfdist_policies is no policy with plain arguments"),
        ("__import__('os').getcwd()", "--tfdist_policies is no policy with plain arguments"),
        ("Warmup(epochs=__import__('os'))", "--tfdist_policies is no policy with plain arguments"),
        ("open('x')", "--tfdist_policies names no policy; use one of BackupWorkers"),
        ("BackupWorker(spares=1)", "--tfdist_policies names no policy; did you mean BackupWorkers?"),
        ("Task('worker', 0)", "--tfdist_policies names no policy"),
        ("BackupWorkers()", "--tfdist_policies must be BackupWorkers(spares, max_spares=None); write --tfdist_policie"),
        ("BackupWorkers(spares=-1)", "--tfdist_policies=BackupWorkers(spares=-1): BackupWorkers(spares=...)"),
        ("Warmup(epochs=" + "(" * 400 + ")" * 400 + ")", "--tfdist_policies: ".rstrip(": ")),
        (f"Warmup(epochs={[1.5] * 1000})", "--tfdist_policies=Warmup("),
        ("Warmup" * 2000, "--tfdist_policies is no policy with plain arguments"),
    ],
)
def test_what_is_no_policy(text, words):
    with pytest.raises(ValueError) as caught:
        tfdist_flags.parse_policy(text)
    assert str(caught.value).startswith(words)
    assert "\n" not in str(caught.value)


def test_remedy_names_the_policies_that_were_typed():
    calls = ["BackupWorkers(spares=1)", "SoftSync(updates=2)", 'Compression(codec="auto")']
    with pytest.raises(ValueError, match="Received: ") as caught:
        tfdist_flags.parse_policy("[BackupWorkers(spares=1), SoftSync(updates=x), Compression]")
    assert re.findall("--tfdist_policies='(.*?)'", str(caught.value)) == calls
    assert all(map(tfdist_flags.parse_policy, calls))


def test_flagfiles(tmp_path):
    path = tmp_path / "run.flags"
    path.write_text(
        "# one\n--tfdist_strategy=parameter_server\n--tfdist_policies=SoftSync(updates=2)\n--tfdist_num_ps=3\n"
    )
    found = values(f"--flagfile={path}")
    assert found.tfdist_num_ps == 3
    assert repr(tfdist_flags.policies_from_flags(found)) == "[SoftSync(updates=2)]"


# Clusters.


def test_sizes_that_are_not_given_are_not_compared_with_the_cluster():
    found = values()
    assert found.tfdist_num_workers is None
    assert found.tfdist_num_ps is None


CLUSTER = {"worker": ["a:1", "b:1"], "ps": ["c:1"], "chief": ["d:1"]}


def test_a_cluster_becomes_tf_config(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    seen = {}
    monkeypatch.setitem(tfdist_flags._BUILDERS, "parameter_server", lambda v, p: seen.update(policies=p) or "built")
    found = values(
        f"--tfdist_cluster={json.dumps(CLUSTER)}", "--tfdist_task=chief:0", "--tfdist_policies=Warmup(epochs=1)"
    )
    try:
        assert tfdist.strategy_from_flags(found) == "built"
        assert tfdist.Cluster.from_tf_config() == tfdist.Cluster(CLUSTER, tfdist.Task("chief", 0))
        assert repr(seen["policies"]) == "[Warmup(epochs=1)]"
        with pytest.raises(ValueError, match="--tfdist_cluster and the variable TF_CONFIG both describe the cluster"):
            tfdist.strategy_from_flags(found)
    finally:
        os.environ.pop("TF_CONFIG", None)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tfdist_cluster={}"], "--tfdist_cluster and --tfdist_task belong together; add --tfdist_task=worker:0"),
        (["--tfdist_task=worker:0"], "--tfdist_cluster and --tfdist_task belong together; add --tfdist_cluster"),
        (["--tfdist_cluster={}", "--tfdist_task=worker"], "--tfdist_task is no task; write worker:1. Received:"),
        (["--tfdist_cluster={}", "--tfdist_task=boss:0"], "--tfdist_cluster, --tfdist_task: "),
        (["--tfdist_cluster={'a': 1}", "--tfdist_task=ps:0"], "--tfdist_cluster, --tfdist_task: the value is not JSON"),
        (['--tfdist_cluster={"worker": ["a:1"]}', "--tfdist_task=worker:1"], "--tfdist_cluster, --tfdist_task: task.i"),
    ],
)
def test_clusters_that_make_no_sense(arguments, words, monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    with pytest.raises(ValueError) as caught:
        tfdist.strategy_from_flags(values(*arguments))
    assert str(caught.value).startswith(words)


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (None, "mirrored"),
        ({"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}, "multi_worker"),
        ({"cluster": CLUSTER, "task": {"type": "ps", "index": 0}}, "parameter_server"),
    ],
)
def test_the_strategy_that_suits_the_cluster(config, name, monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    if config:
        monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    for other in tfdist_flags._BUILDERS:
        monkeypatch.setitem(tfdist_flags._BUILDERS, other, lambda v, p, other=other: other)
    assert tfdist.strategy_from_flags(values()) == name


# Strategies.


@pytest.mark.devices
def test_a_mirrored_strategy_trains_nothing_but_is_there(cpus, monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    found = values("--tfdist_devices=CPU:0,CPU:1,CPU:2", "--tfdist_policies=BackupWorkers(spares=1)")
    strategy = tfdist.strategy_from_flags(found)
    assert isinstance(strategy, tfdist.MirroredStrategy)
    assert strategy.num_replicas_in_sync == 3
    with pytest.raises(ValueError, match="DropStale"):
        tfdist.strategy_from_flags(values("--tfdist_policies=DropStale(1)"))


@pytest.mark.devices
def test_devices_per_replica_reaches_the_strategy(cpus, monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    options = "--tfdist_devices=CPU:0,CPU:1,CPU:2,CPU:3", "--tfdist_devices_per_replica=2"
    assert tfdist.strategy_from_flags(values(*options)).num_replicas_in_sync == 2
    for name in ("multi_worker", "parameter_server"):
        with pytest.raises(ValueError, match=r"devices_per_replica=3\): does not divide the number of devices"):
            tfdist.strategy_from_flags(values(f"--tfdist_strategy={name}", "--tfdist_devices_per_replica=3"))
    with pytest.raises(ValueError, match=r"replicas of one device each.*Received: --tfdist_devices_per_replica=2"):
        tfdist.strategy_from_flags(values("--tfdist_strategy=tpu", "--tfdist_devices_per_replica=2"))


def test_tpus_take_no_policy():
    found = values("--tfdist_strategy=tpu", "--tfdist_policies=Warmup(epochs=1)")
    with pytest.raises(ValueError, match=r"--tfdist_strategy=tpu goes with no policy.*Received: Warmup\(epochs=1\)"):
        tfdist.strategy_from_flags(found)


@pytest.mark.devices
def test_telemetry(tmp_path):
    assert tfdist_flags.callbacks_from_flags(values()) == []
    (callback,) = tfdist_flags.callbacks_from_flags(values(f"--tfdist_telemetry_dir={tmp_path}"))
    assert type(callback).__name__ == "Telemetry"


# Anything else.

NAMES = ["BackupWorkers", "Warmup", "SoftSync", "DropStale", "ParameterAveraging", "StalenessScaling", "Task", "x"]
STARTS = ["", "spares=", "epochs=", "*", "**"]
CALLS = st.builds("{}({}{})".format, st.sampled_from(NAMES), st.sampled_from(STARTS), st.text(max_size=9))
# How many cases: few each time, as many as were promised in `make test-all`.
CASES = pytest.mark.parametrize(
    "cases", [500, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)


@CASES
def test_fuzz_policies(cases):
    @settings(max_examples=cases, deadline=None, database=None)
    @given(CALLS | st.text("BackupWorkers(=1,'[]{}*)", max_size=30) | st.text(max_size=20))
    @example("Warmup(\n)")
    def check(text):
        try:
            tfdist_flags.parse_policy(text)
        except ValueError as error:
            assert "\n" not in str(error)

    check()


@CASES
def test_fuzz_clusters(cases):
    @settings(max_examples=cases, deadline=None, database=None)
    @given(st.text('{}[]":, abworkeps012', max_size=40), st.text("abworkeps:012", max_size=10))
    def check(text, task):
        try:
            tfdist_flags.parse_cluster(text, task)
        except tfdist.ClusterError as error:
            assert "\n" not in str(error)

    check()


@CASES
def test_fuzz_flags(cases):
    @settings(max_examples=cases, deadline=None, database=None)
    @given(st.sampled_from(sorted(n for n in values() if len(n) > 1)), st.text(max_size=12))
    def check(name, text):
        with contextlib.suppress(ValueError, flags.Error):
            tfdist_flags.policies_from_flags(values(f"--{name}={text}"))

    check()
