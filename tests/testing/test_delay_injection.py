# SPDX-License-Identifier: Apache-2.0
"""Delays: whom they meet, that they end when they are stopped, and how they are given from the environment."""

from __future__ import annotations

import threading
import types
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist.coordination import delay_hook
from tfdist.testing import Delays, constant, delay_injection, delays, lognormal, pareto, stalls

FOR_EVER_SECS = 1e6


@pytest.fixture(autouse=True)
def as_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has made no contribution yet."""
    monkeypatch.delenv(delay_hook.VARIABLE, raising=False)
    monkeypatch.setattr(delay_hook, "installed", delay_hook._read_environment)


class Slept:
    """Takes the place of the event that a delay waits for, and notes the seconds."""

    def __init__(self) -> None:
        self.secs: list[float] = []

    def wait(self, secs: float) -> None:
        self.secs.append(secs)

    def set(self) -> None:
        pass


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> Slept:
    noted = Slept()
    monkeypatch.setattr(delay_injection, "threading", types.SimpleNamespace(Event=lambda: noted))
    return noted


def test_without_delays_nothing_happens(slept: Slept) -> None:
    delay_hook.before_contribution(0, 0)
    assert slept.secs == []


def test_delays_meet_the_replicas_named(slept: Slept) -> None:
    with Delays({"worker:1": constant(0.25), "worker:2": stalls(9.0, 2)}):
        for attempt in range(2):
            for replica in range(4):
                delay_hook.before_contribution(replica, attempt)
    delay_hook.before_contribution(1, 2)
    assert slept.secs == [0.25, 0.25, 9.0]


def test_a_star_means_all_that_are_not_named(slept: Slept) -> None:
    with Delays({"worker:1": constant(0.25), "*": constant(0.5)}):
        for replica in range(3):
            delay_hook.before_contribution(replica, 0)
    assert slept.secs == [0.5, 0.25, 0.5]


def test_one_law_meets_all_with_its_own_draws(slept: Slept) -> None:
    distribution = lognormal(0.2, 1.0)
    with Delays(distribution, seed=3) as injected:
        for replica in range(3):
            delay_hook.before_contribution(replica, 5)
    assert slept.secs == [distribution.draw(3, replica, 5) for replica in range(3)]
    assert slept.secs == [injected.secs(replica, 5) for replica in range(3)]


def test_who_sleeps_is_woken_when_the_delays_are_stopped() -> None:
    asleep = threading.Event()

    class Asleep:
        def draw(self, *place: int) -> float:
            asleep.set()
            return FOR_EVER_SECS

    injected = delays(constant(0.0))
    injected.distributions["*"] = Asleep()  # type: ignore[assignment]
    sleeper = threading.Thread(target=delay_hook.before_contribution, args=(0, 0), daemon=True)
    sleeper.start()
    assert asleep.wait(30)
    injected.stop()
    sleeper.join(30)
    assert not sleeper.is_alive()
    injected.stop()  # The second time it does nothing.


def test_delays_can_be_started_again(slept: Slept) -> None:
    injected = Delays(constant(1.0))
    for _ in range(2):
        with injected:
            delay_hook.before_contribution(0, 0)
        delay_hook.before_contribution(0, 0)
    assert slept.secs == [1.0, 1.0]


def test_delays_are_not_laid_over_each_other() -> None:
    with Delays(constant(0.0)), pytest.raises(RuntimeError, match="stop the others first"):
        delays(constant(0.0))
    delays(constant(0.0)).stop()


# From the environment.


def test_the_environment_gives_delays(monkeypatch: pytest.MonkeyPatch, slept: Slept) -> None:
    monkeypatch.setenv(
        delay_hook.VARIABLE, '{"worker:1": {"distribution": "lognormal", "mean": 0.2, "s": 1.0}, "seed": 4}'
    )
    for replica in range(3):
        delay_hook.before_contribution(replica, 7)
    assert slept.secs == [lognormal(0.2, 1.0).draw(4, 1, 7)]


def test_the_program_s_own_delays_come_before_those_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, slept: Slept
) -> None:
    monkeypatch.setenv(delay_hook.VARIABLE, '{"*": {"distribution": "constant", "secs": 2}}')
    with Delays(constant(1.0)):
        delay_hook.before_contribution(0, 0)
    delay_hook.before_contribution(0, 1)
    assert slept.secs == [1.0]


def test_the_first_contributions_may_come_all_at_once(monkeypatch: pytest.MonkeyPatch, slept: Slept) -> None:
    monkeypatch.setenv(delay_hook.VARIABLE, '{"*": {"distribution": "constant", "secs": 2}}')
    barrier = threading.Barrier(8)

    def contribute(replica: int) -> None:
        barrier.wait()
        delay_hook.before_contribution(replica, 0)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(contribute, range(8)))
    assert slept.secs == [2.0] * 8


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "must be JSON"),
        ("[]", "object"),
        ('{"worker:1": 0.2}', "0.2"),
        ('{"worker:1": {"distribution": "weibull"}}', "lognormal(mean, s)"),
        ('{"ps:0": {"distribution": "constant", "secs": 1}}', "'ps:0'"),
        ('{"worker:1": {"distribution": "constant", "secs": -1}}', "secs=-1"),
        ('{"*": {"distribution": "constant", "secs": 1}, "seed": "a"}', "seed='a'"),
    ],
)
def test_an_environment_that_makes_no_sense_is_one_line_each_time(
    monkeypatch: pytest.MonkeyPatch, text: str, named: str
) -> None:
    monkeypatch.setenv(delay_hook.VARIABLE, text)
    for _ in range(2):
        with pytest.raises(ValueError, match="TFDIST_TEST_DELAYS") as raised:
            delay_hook.before_contribution(0, 0)
        assert named in str(raised.value)
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize("wrong", [{"worker:x": constant(1)}, {1: constant(1)}, {"*": 0.5}, {"chief": constant(1)}])
def test_delays_of_nobody(wrong: Any) -> None:
    with pytest.raises(ValueError, match="Received: "):
        Delays(wrong)


@given(
    means=st.dictionaries(st.one_of(st.just("*"), st.integers(0, 99).map("worker:{}".format)), st.floats(0.01, 10)),
    seed=st.integers(0, 2**31),
)
def test_json_gives_the_same_delays(means: dict[str, float], seed: int) -> None:
    injected = Delays({name: pareto(mean, 2.0) for name, mean in means.items()}, seed)
    again = Delays.from_json(injected.to_json())
    assert (again.distributions, again.seed) == (injected.distributions, injected.seed)
    for replica in (0, 1, 50, 200):
        assert again.secs(replica, 3) == injected.secs(replica, 3)
