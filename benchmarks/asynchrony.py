# SPDX-License-Identifier: Apache-2.0
"""The rows about asynchronous training: what a slow worker costs, what a bound costs, and what the chief costs.

asynchronous  4 workers, one 10 times as slow, no policy, against what the same workers reach when each is alone
bounded       the same workers under BoundedStaleness(s), against a smaller s
overhead      8 workers whose steps sleep, against a ClusterCoordinator that schedules the same steps
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import arena
import scenarios

ROWS = ("asynchronous", "bounded", "overhead")
STRATEGY = "parameter_server"
BOUNDS = (1, 2, 4, 8)
_ROUNDS = {"asynchronous": 3, "bounded": 5, "overhead": 5}
_SEGMENT_SECS = 4.0
_LONGER = 8
# A second of the slow worker and a part of the next one say little of a bound.
_BOUNDED_LONGER = 3
# Steps per second of three workers that take 0.1 s for one, and one that takes 1 s.
_LIMIT = 3 / 0.1 + 1 / 1.0
_NUM_WORKERS = 4
_NUM_SLEEPING_WORKERS = 8
_WARM_UP_STEPS = 16

Result = dict[str, Any]
Compare = Callable[[float | None, Sequence[float], Sequence[float]], Result]


def measure(
    rows: Collection[str],
    rounds: int | None,
    segment_secs: float | None,
    compare: Compare,
    progress: Callable[[str], None],
) -> Iterator[Result]:
    """Measures those of `ROWS` that are among `rows`.

    Args:
      rows: names of rows.
      rounds: segments of each contender, if not those of this file.
      segment_secs: how long a segment takes, if not as in this file.
      compare: makes a result of the least ratio wanted, our rates and the rival's, in steps per second by round.
      progress: is told what happens.
    """
    for name, row in zip(ROWS, (_asynchronous, _bounded, _overhead), strict=True):
        if name in rows:
            say = lambda text, name=name: progress(f"{name}: {text}")  # noqa: E731
            yield from row(rounds or _ROUNDS[name], segment_secs or _SEGMENT_SECS, compare, say)


def _asynchronous(rounds: int, secs: float, compare: Compare, say: Callable[[str], None]) -> Iterator[Result]:
    with contextlib.ExitStack() as stack:
        together = _start(stack, "tfdist", "uneven", _NUM_WORKERS)
        fast, slow = _start(stack, "tfdist", "0.1 s", 1), _start(stack, "tfdist", "1 s", 1)
        # A segment ends with the step that the slow worker is in, so that it has to be long for the sum of the rates.
        for team, steps in ((together, _LONGER * secs * _LIMIT), (fast, secs / 0.1), (slow, 2 * secs / 1.0)):
            _warm_up(team, round(steps), "", say)
        # Two teams of one name, so one after another instead of in a duel.
        rates: list[list[float]] = [[], [], []]
        for number in range(rounds):
            say(f"round {number + 1} of {rounds}")
            for index in range(3):
                which = (number + index) % 3
                team = (together, fast, slow)[which]
                rates[which].append(team.steps / team.segment())
    own = [3 * each_fast + each_slow for each_fast, each_slow in zip(rates[1], rates[2], strict=True)]
    head = {"row": "asynchronous", "strategy": STRATEGY, "delays": "10x", "size": "tiny"}
    yield head | {"rival": "own rates"} | compare(0.95, rates[0], own)
    yield head | {"rival": "limit"} | compare(None, rates[0], [_LIMIT] * rounds)


def _bounded(rounds: int, secs: float, compare: Compare, say: Callable[[str], None]) -> Iterator[Result]:
    delays = scenarios.STALLED.delays
    with contextlib.ExitStack() as stack:
        teams = [_start(stack, f"bound={bound}", "tiny", _NUM_WORKERS) for bound in BOUNDS]
        for team, bound in zip(teams, BOUNDS, strict=True):
            # While the slow worker computes for a second there are so many updates, then its own, and then those that
            # were held back.
            _warm_up(
                team, round(_BOUNDED_LONGER * secs * (bound + min(_NUM_WORKERS, bound + 1))), delays(0).to_json(), say
            )
        rates = arena.duel(teams, rounds, lambda number: delays(number).to_json(), say)
        largest = [team.ask()[0] for team in teams]
    by_bound = list(rates.values())
    for number, bound in enumerate(BOUNDS[1:], 1):
        less = BOUNDS[number - 1]
        result = {"row": "bounded", "strategy": STRATEGY, "delays": f"10x, s={bound}", "size": "tiny"}
        result |= {"rival": f"s={less}"} | compare(1.0, by_bound[number], by_bound[number - 1])
        result |= {"largest_staleness": largest[number], "rival_largest_staleness": largest[number - 1]}
        result["met"] = result["met"] and largest[number] <= bound and largest[number - 1] <= less
        yield result


def _overhead(rounds: int, secs: float, compare: Compare, say: Callable[[str], None]) -> Iterator[Result]:
    count = _NUM_SLEEPING_WORKERS
    with contextlib.ExitStack() as stack:
        teams = [_start(stack, name, "0.1 s", count) for name in ("tfdist", "soft_sync=1", "bare")]
        for team in teams:
            _warm_up(team, count * round(secs / 0.1), "", say)
        ours, with_policy, bare = arena.duel(teams, rounds, lambda number: "", say).values()
    head = {"row": "overhead", "strategy": STRATEGY, "rival": "bare"}
    yield head | {"delays": "100 ms", "size": "tiny"} | compare(0.9, ours, bare)
    yield head | {"delays": "100 ms, S=1", "size": "tiny"} | compare(0.9, with_policy, bare)


def _start(stack: contextlib.ExitStack, contender: str, size: str, num_workers: int) -> arena.Team:
    return stack.enter_context(arena.Team(f"{STRATEGY}/{contender}", size, num_workers, 1))


def _warm_up(team: arena.Team, steps: int, delays: str, say: Callable[[str], None]) -> None:
    """Traces the graph; where sleeps say how long a step takes, no trial is needed."""
    say(f"warming up {team.name}")
    team.wait_ready()
    team.prepare(max(2, min(_WARM_UP_STEPS, steps)))
    team.segment(delays)
    team.prepare(max(2, steps))


def summary(result: Result) -> str:
    """Summary of results without a column in the table."""
    if "largest_staleness" not in result:
        return ""
    return f"  largest staleness {result['largest_staleness']}, the rival's {result['rival_largest_staleness']}"
