# SPDX-License-Identifier: Apache-2.0
"""A profile from the update log of a run: the real arrivals of its gradients. docs/update_log.md has the format.

A log has no bytes: what the gradients' arrivals took includes sending them in that run, so a prediction from a log is
one for links like those of the run.
"""

from __future__ import annotations

import pathlib
import statistics

from tfdist.advisor.profile import Profile, ProfileError, StepTimes

# Gradients at the beginning, of each worker, that trace and find caches cold.
_WARM_UP = 2
_MOST_SAMPLES = 4000
_LEAST_SAMPLES = 10


def load(directory: pathlib.Path) -> Profile:
    """Reads the logs below a directory.

    Raises:
      ProfileError: there is no log, or it has too few updates, or says nothing of examples.
    """
    from tfdist import update_log  # needs NumPy, which other profiles don't

    try:
        timeline = update_log.read_logs(directory)
    except (OSError, ValueError) as error:
        raise ProfileError(f"{directory} has no update log: {' '.join(str(error).split())}") from None
    contributions, updates = timeline.contributions, timeline.updates
    durations: dict[int, list[float]] = {}
    for worker, start, arrival, outcome in zip(
        contributions.worker, contributions.start, contributions.arrival, contributions.outcome, strict=True
    ):
        if outcome != update_log.Outcome.LOST and arrival > start:
            durations.setdefault(int(worker), []).append(float(arrival - start))
    counted = {worker: own[_WARM_UP:] for worker, own in durations.items() if len(own) > _WARM_UP}
    samples = [secs for own in counted.values() for secs in own]
    # In equal parts of all workers, so that a long run does not count the first worker alone.
    samples = samples[:: -(-len(samples) // _MOST_SAMPLES)] if samples else []
    if len(samples) < _LEAST_SAMPLES:
        raise ProfileError(
            f"{directory} has {len(samples)} gradients after the first {_WARM_UP} of each worker; {_LEAST_SAMPLES} are "
            "needed, so train for longer"
        )
    accepted = [int(count) for count in _accepted(timeline)]
    examples = [int(each) / count for each, count in zip(updates.examples, accepted, strict=True) if each > 0 and count]
    size = max(1, round(statistics.median(examples))) if examples else 1
    header = timeline.header
    fastest = min(counted, key=lambda worker: statistics.fmean(counted[worker]))
    return Profile(
        batch_size=size,
        steps=(StepTimes(size, tuple(samples)),),
        noise_reason="an update log has no gradients",
        script=str(directory),
        model=f"run with {len(timeline.workers)} workers",
        strategy=header.strategy,
        fastest_secs=tuple(counted[fastest][:_MOST_SAMPLES]),
        fastest_worker=timeline.workers[fastest],
    )


def _accepted(timeline: object) -> list[int]:
    """Number of accepted gradients of each update."""
    from tfdist import update_log

    counts = [0] * len(timeline.updates)  # type: ignore[attr-defined]
    outcomes = timeline.contributions.outcome  # type: ignore[attr-defined]
    for update, outcome in zip(timeline.update_of(), outcomes, strict=True):  # type: ignore[attr-defined]
        counts[update] += int(outcome == update_log.Outcome.ACCEPTED)
    return counts
