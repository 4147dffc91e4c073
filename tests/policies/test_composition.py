# SPDX-License-Identifier: Apache-2.0
"""Policies go together as docs/policies.md says."""

from __future__ import annotations

import itertools
import pathlib

import pytest

import tfdist
from tfdist.planning import simulation
from tfdist.policies import composition
from tfdist.policies.asynchronous import Asynchronous
from tfdist.policies.base import Policy

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "policies.md"
POLICIES = {
    "BackupWorkers": lambda: tfdist.BackupWorkers(1),
    "SoftSync": lambda: tfdist.SoftSync(2),
    "StalenessScaling": lambda: tfdist.StalenessScaling(),
    "DropStale": lambda: tfdist.DropStale(3),
    "BoundedStaleness": lambda: tfdist.BoundedStaleness(4),
    "Warmup": lambda: tfdist.Warmup(steps=5),
    "ParameterAveraging": lambda: tfdist.ParameterAveraging(6),
    "Compression": lambda: tfdist.Compression(tfdist.compression.HalfPrecision("float16")),
    "LazyRows": lambda: tfdist.LazyRows(),
}
STRATEGIES = ("MirroredStrategy", "MultiWorkerMirroredStrategy", "ParameterServerStrategy")


def _goes(policies: list[Policy], strategy: str) -> bool:
    try:
        composition.check_policies(policies, strategy)
    except ValueError:
        return False
    return True


def _table(title: str) -> dict[tuple[str, str], str]:
    """{(row, column): cell} of the first table below a heading of the page."""
    lines = PAGE.read_text().split(f"## {title}\n", 1)[1].splitlines()
    rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    rows = rows[: next((i for i, row in enumerate(rows) if len(row) != len(rows[0])), len(rows))]
    return {(row[0], column): cell for row in rows[2:] for column, cell in zip(rows[0][1:], row[1:], strict=True)}


def test_the_table_of_strategies_is_what_the_constructors_say() -> None:
    shown = _table("What goes with which strategy")
    assert {key: cell == "yes" for key, cell in shown.items()} == {
        (policy, strategy): _goes([make()], strategy) for policy, make in POLICIES.items() for strategy in STRATEGIES
    }


def test_the_table_of_pairs_is_what_the_constructors_say() -> None:
    shown = _table("What goes together")
    for first, second in itertools.permutations(POLICIES, 2):
        goes = any(_goes([POLICIES[first](), POLICIES[second]()], strategy) for strategy in STRATEGIES)
        assert (shown[first, second] == "yes") == goes, (first, second)


def test_errors_name_both_policies_and_what_to_use_instead() -> None:
    with pytest.raises(
        ValueError,
        match=r"BackupWorkers\(spares=1\) and SoftSync\(updates=2\) don't go together: .*use one or the other\. "
        r"Received: policies=\[SoftSync\(updates=2\), BackupWorkers\(spares=1\)\]",
    ):
        composition.check_policies([tfdist.SoftSync(2), tfdist.BackupWorkers(1)], "ParameterServerStrategy")
    with pytest.raises(ValueError, match=r"SoftSync\(updates=2\) does not go with MirroredStrategy: .*BackupWorkers"):
        composition.check_policies([tfdist.SoftSync(2)], "MirroredStrategy")
    with pytest.raises(ValueError, match=r"ParameterAveraging\(every_steps=6\) does not go with ParameterServer.*Soft"):
        composition.check_policies([tfdist.ParameterAveraging(6)], "ParameterServerStrategy")
    with pytest.raises(ValueError, match=r"ParameterAveraging.* and BackupWorkers.* don't go together"):
        composition.check_policies(
            [tfdist.BackupWorkers(1), tfdist.ParameterAveraging(2)], "MultiWorkerMirroredStrategy"
        )


def test_arguments_that_a_policy_excludes_are_refused() -> None:
    words = "does not go with devices_per_replica=2: .*one device per worker"
    with pytest.raises(ValueError, match=rf"policies: Compression\(.*{words}.* Received: policies=\[Compression"):
        composition.check_policies([POLICIES["Compression"]()], "ParameterServerStrategy", devices_per_replica=2)
    composition.check_policies([POLICIES["LazyRows"]()], "ParameterServerStrategy", devices_per_replica=2)
    composition.check_policies([POLICIES["Compression"]()], "ParameterServerStrategy", devices_per_replica=1)


@pytest.mark.parametrize("policies", [tfdist.BackupWorkers(1), [1], "auto", 3, [tfdist.compression.SignSGD()]])
def test_what_is_no_list_of_policies(policies: object) -> None:
    example = r"\[(BackupWorkers\(spares=1\)|Compression\(SignSGD\(\)\))\]"
    with pytest.raises(ValueError, match=rf"policies must be a list of policies such as {example}\. Received"):
        composition.check_policies(policies, "MirroredStrategy")  # type: ignore[arg-type]


def test_none_and_iterators_are_policies_as_lists_are() -> None:
    policy = tfdist.BackupWorkers(1)
    assert composition.check_policies(None, "MirroredStrategy") == ()
    assert composition.check_policies(iter([policy]), "MirroredStrategy") == (policy,)


@pytest.mark.devices
def test_none_as_policies_is_accepted_by_all_that_take_policies() -> None:
    assert repr(tfdist.MirroredStrategy(["CPU:0"], policies=None)) == repr(tfdist.MirroredStrategy(["CPU:0"]))
    assert tfdist.MultiWorkerMirroredStrategy(policies=None).distribution.policies == ()
    model = simulation.ModelProfile(dense_bytes="1MB", batch_size=1)
    cluster = simulation.ClusterModel(workers=2, compute=simulation.constant(0.1))
    assert simulation.simulate(cluster, model, policies=None, num_updates=2).policies == ()


def test_a_list_comes_to_one_that_decides() -> None:
    none = composition.compose([], "ParameterServerStrategy", 4)
    assert none == composition.Composition()
    lazy = composition.compose([tfdist.LazyRows()], "ParameterServerStrategy", 4)
    assert lazy == composition.Composition(is_lazy=True)
    warmup = tfdist.Warmup(steps=1)
    alone = composition.compose([warmup], "ParameterServerStrategy", 4)
    assert isinstance(alone.aggregation, Asynchronous)
    assert alone.aggregation.replicas_to_aggregate == 1
    assert alone.warmup is warmup
    soft = composition.compose([tfdist.SoftSync(2), tfdist.StalenessScaling()], "ParameterServerStrategy", 4)
    assert soft.aggregation is not None
    assert soft.aggregation.replicas_to_aggregate == 2
    assert soft.aggregation.is_weighted


def test_a_policy_that_nobody_would_ask_is_refused() -> None:
    class Own(Policy):
        def __repr__(self) -> str:
            return "Own()"

    with pytest.raises(
        ValueError, match=r"policies: Own\(\) is of no kind that a strategy asks; derive it from one of"
    ):
        composition.check_policies([Own()], "MirroredStrategy")


def test_a_policy_derived_from_another_takes_its_place() -> None:
    class Longer(tfdist.Warmup):
        pass

    class Half(tfdist.SoftSync):
        pass

    longer, half = Longer(steps=3), Half(updates=2)
    composition.check_policies([longer, half], "ParameterServerStrategy")
    assert composition.compose([longer, half], "ParameterServerStrategy", 4).warmup is longer
    with pytest.raises(ValueError, match="there can be only one of a kind"):
        composition.check_policies([longer, tfdist.Warmup(steps=1)], "MirroredStrategy")
    with pytest.raises(ValueError, match="all replicas update at once there"):
        composition.check_policies([half], "MirroredStrategy")


def test_variables_have_a_way_back_under_parameter_servers_only() -> None:
    policies = [tfdist.Compression(tfdist.compression.SignSGD(), variables="bfloat16")]
    composition.check_policies(policies, "ParameterServerStrategy")
    with pytest.raises(
        ValueError, match=r"Compression\(SignSGD\(\), variables='bfloat16'\): .* leave it away\. Received"
    ):
        composition.check_policies(policies, "MultiWorkerMirroredStrategy")


def test_momentum_of_a_codec_does_not_go_with_averages_of_parameters() -> None:
    policies = [tfdist.ParameterAveraging(2), tfdist.Compression(tfdist.compression.TopK(0.1))]
    with pytest.raises(ValueError, match=r"TopK\(density=0.1\)\) has momentum.* momentum=0\. Received: policies="):
        composition.check_policies(policies, "MultiWorkerMirroredStrategy")
    policies[1] = tfdist.Compression(tfdist.compression.TopK(0.1, momentum=0))
    composition.check_policies(policies, "MultiWorkerMirroredStrategy")
