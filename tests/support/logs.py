# SPDX-License-Identifier: Apache-2.0
"""Update logs for tests of the commands that show them: simulated trainings of a few or many workers."""

from __future__ import annotations

import os
import pathlib

import numpy as np

from tfdist.telemetry.update_log import EventKind, Header, LogWriter, Outcome, UpdateRecord


def write_synchronous(
    directory: str | os.PathLike[str],
    num_workers: int = 4,
    num_updates: int = 100,
    spares: int = 0,
    slow: dict[int, float] | None = None,
    job: str = "job1",
    origin_secs: float = 1e9,
) -> None:
    """Writes the log of updates from the first gradients of each step; late ones are dropped.

    Args:
      directory: run directory.
      num_workers: number of workers.
      num_updates: number of updates.
      spares: number of gradients that no update waits for.
      slow: factors on the time of some workers' gradients.
      job: identifier of the job.
      origin_secs: Unix time of the begin.
    """
    names = tuple(f"worker:{index}" for index in range(num_workers))
    policies = (f"BackupWorkers(spares={spares})",) if spares else ()
    strategy = "MultiWorkerMirroredStrategy"
    header = Header(job, "chief:0", names, strategy, policies, origin_secs)
    writer = LogWriter(str(pathlib.Path(directory, "policy", "updates")), header, flush_secs=3600.0)
    random, factors = np.random.default_rng(0), np.ones(num_workers)
    for worker, factor in (slow or {}).items():
        factors[worker] = factor
    free, now = np.zeros(num_workers), 0.0
    late: list[tuple[float, int, float, int]] = []
    for step in range(1, num_updates + 1):
        opened, arrivals = now, []
        for worker in np.flatnonzero(free <= now):
            secs = float(random.gamma(8.0, 0.0125) * factors[worker])
            arrivals.append((now + secs, int(worker), now, step))
        arrivals = sorted([*arrivals, *late])
        fresh = [each for each in arrivals if each[3] == step]
        needed = max(1, min(len(fresh), num_workers - spares))
        now = fresh[needed - 1][0]
        counted = [each for each in arrivals if each[0] <= now]
        late = [each for each in arrivals if each[0] > now]
        for arrival, worker, *_ in late:
            free[worker] = arrival
        rows = [
            (worker, start, arrival, int(Outcome.DROPPED), step - begun, 0.0, 0.0)
            if begun < step
            else (worker, start, arrival, int(Outcome.ACCEPTED), 0, 1.0, 0.0)
            for arrival, worker, start, begun in counted
        ]
        now += 0.002
        writer.add(UpdateRecord(step, now, now - opened, now - fresh[0][0], 32 * len(rows), int(step <= 3), rows))
    writer.event(EventKind.PHASE_CHANGED, "all replicas train", time=0.5)
    writer.event(EventKind.LOST, "no answer for 10 s", worker=num_workers - 1, time=now)
    writer.close()
