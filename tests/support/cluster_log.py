# SPDX-License-Identifier: Apache-2.0
"""Update logs of simulated clusters of any size, for tests, the benchmark of the page, and its screenshots."""

from __future__ import annotations

import json
import pathlib
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from tfdist.telemetry.update_log import Contributions, EventKind, Header, LogWriter, Updates


def write(
    directory: pathlib.Path,
    workers: int,
    updates: int,
    spares: int = 1,
    job: str = "job",
    origin_secs: float = 1.7e9,
    slow: float | Sequence[float] = 1.3,
    scalars: Sequence[tuple[str, int, float, float]] = (),
) -> None:
    """Writes the log of a synchronous training with backup workers.

    A gradient takes 0.1 s on average; the last workers take `slow` times as long, and each one stalls now and then. The
    second worker is lost in the middle of the training for a hundred updates.
    """
    names = tuple(f"worker:{worker}" for worker in range(workers))
    policies = (f"BackupWorkers(spares={spares})",)
    header = Header(job, "chief:0", names, "ParameterServerStrategy", policies, origin_secs, simulated=True)
    log = LogWriter(str(directory), header, flush_secs=3600.0, max_contributions=2**62)
    columns, gradients = _train(workers, updates, spares, np.random.default_rng(0), slow)
    log.add_columns(columns, gradients)
    half = updates // 2
    for row, kind, text in (
        (half, EventKind.LOST, "worker:1 was lost"),
        (half + 100, EventKind.RETURNED, "worker:1 is back"),
    ):
        if row < updates:
            log.event(kind, text, 1, float(columns.time[row]))
    for each in scalars:
        log.scalar(*each)
    log.close()


def _train(
    workers: int, updates: int, spares: int, random: np.random.Generator, slow: float | Sequence[float]
) -> tuple[Updates, Contributions]:
    needed = workers - spares
    secs = 0.05 + random.gamma(5.0, 0.01, (updates, workers))
    secs *= np.where(random.random((updates, workers)) < 0.01, random.uniform(3, 8, (updates, workers)), 1)
    secs[:, -np.size(slow) :] *= slow
    half, now, is_away = updates // 2, 0.0, np.zeros(workers, bool)
    start, local, free = np.full(workers, np.nan), np.zeros(workers, np.int64), np.zeros(workers)
    times, waits, counts, rows = [], [], [], []
    for step in range(updates):
        if workers > 2 and spares and step in (half, half + 100):
            is_away[1], free[1] = step == half, now
        dropped = []
        if is_away[1:2].any() and step == half:
            # It dies 20 ms after the start of its gradient.
            dropped.append((1, now if np.isnan(start[1]) else start[1], now + 0.02, 2, 0, 0.0))
            start[1] = np.nan
        idle = np.isnan(start) & ~is_away
        held = np.where(idle, now - free, 0.0)
        start[idle], local[idle] = now, step
        end = start + secs[local, np.arange(workers)]
        # Workers that are late with the gradient of an earlier step deliver it, and start with this step.
        while True:
            late = np.flatnonzero(~np.isnan(start) & (local < step))
            fresh = np.sort(np.where(local == step, end, np.inf)[~np.isnan(start)])
            due = fresh[min(needed, len(fresh)) - 1]
            late = late[end[late] < due]
            if not len(late):
                break
            for worker in late:
                dropped.append((worker, start[worker], end[worker], 1, step - local[worker], held[worker]))
                start[worker], local[worker] = end[worker], step
                end[worker] = start[worker] + secs[step, worker]
        made = due + 0.002
        order = np.argsort(end)
        entered = [worker for worker in order if local[worker] == step and end[worker] <= due][:needed]
        rows += [(w, start[w], end[w], 0, 0, held[w]) for w in entered] + dropped
        counts.append(len(entered) + len(dropped))
        times.append(made)
        waits.append(due - now)
        free[entered] = end[entered]
        start[entered] = np.nan
        now = made
    worker, begin, end, outcome, staleness, held = np.array(rows, np.float64).T
    made = np.repeat(times, counts)
    columns = Updates.of(
        step=np.arange(1, updates + 1),
        time=times,
        opened=np.diff(times, prepend=0.0),
        wait=waits,
        examples=np.full(updates, 32 * needed),
        phase=np.zeros(updates),
        count=counts,
        reduce=np.zeros(updates),
    )
    gradients = Contributions.of(
        worker=worker,
        start=begin - made,
        arrival=end - made,
        outcome=outcome,
        staleness=staleness,
        weight=outcome == 0,
        held=held,
        input=np.zeros(len(held)),
    )
    return columns, gradients


def unpacked(block: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Returns header and arrays of a block that the page's plugin has packed."""
    (length,) = struct.unpack_from("<I", block)
    header = json.loads(block[4 : 4 + length])
    place, arrays = 4 + length, {}
    for each in header["arrays"]:
        size = int(np.prod(each["shape"], dtype=np.int64))
        arrays[each["name"]] = np.frombuffer(block, f"<{each['kind']}4", size, place).reshape(each["shape"])
        place += 4 * size
    return header, arrays
