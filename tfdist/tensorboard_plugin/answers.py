# SPDX-License-Identifier: Apache-2.0
"""Answers of the data routes, as JSON values or as one binary block of arrays with a JSON header."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from tfdist.tensorboard_plugin import lod, people
from tfdist.tensorboard_plugin.jobs import Job
from tfdist.update_log import Skipped

# A window with fewer gradients is sent gradient by gradient.
MAX_DETAIL = 5_000
_MAX_BUCKETS = 2_000
_MAX_CELLS = 600_000
_MAX_SHOWN = 200
_MAX_EVENTS = 1_000


class BadRequestError(ValueError):
    """A parameter that is missing or makes no sense; the message is sent to the page."""


def jobs(all_jobs: Sequence[Job], skipped: Sequence[Skipped], logdir: str) -> dict[str, Any]:
    """Returns all jobs, the newest first, and the files that were skipped."""
    return {
        "logdir": logdir,
        "jobs": [job.summary() for job in all_jobs],
        "skipped": [{"path": each.path, "reason": each.reason} for each in skipped[:_MAX_SHOWN]],
        "num_skipped": len(skipped),
    }


def workers(job: Job) -> dict[str, Any]:
    """Returns the table of workers, their lanes, the newest events, and how often each staleness was seen."""
    events = job.timeline.events[-_MAX_EVENTS:]
    rows = job.timeline.contributions
    staleness = np.bincount(rows.staleness[rows.outcome == 0])
    return {
        "rows": job.table,
        "lanes": people.lanes(job.timeline, job.report),
        "in_words": job.report.in_words,
        # Sums of each channel over the whole training: what is zero needs no legend.
        "sums": dict(zip(lod.CHANNELS, job.levels.sums.sum(axis=1).tolist(), strict=True)),
        "detail_updates": job.report.updates,
        "events": [
            {"time": float(moment), "worker": int(worker), "kind": int(kind), "text": str(text), "secs": float(secs)}
            for moment, worker, kind, text, secs in zip(*events.arrays().values(), strict=True)
        ],
        "num_events": len(job.timeline.events),
        "staleness": {str(value): int(staleness[value]) for value in np.flatnonzero(staleness)[:_MAX_SHOWN]},
    }


def window(job: Job, begin: float, end: float, buckets: int) -> bytes:
    """Returns a window: single gradients if they are few, else sums of buckets.

    Raises:
      BadRequestError: the window is empty.
    """
    if not (np.isfinite(begin) and np.isfinite(end) and end > begin):
        raise BadRequestError(f"begin must be before end. Received: begin={begin}, end={end}")
    buckets = max(1, min(buckets, _MAX_BUCKETS, _MAX_CELLS // len(job.timeline.workers)))
    found = job.levels.window(begin, end, buckets)
    header = {
        "begin": found.begin,
        "secs": found.secs,
        "buckets": buckets,
        "workers": len(job.timeline.workers),
        "exact": found.is_exact,
        "channels": list(lod.CHANNELS),
        "update_channels": list(lod.UPDATE_CHANNELS),
        "detail": job.levels.is_detailed(begin, end, MAX_DETAIL),
    }
    arrays = {"cells": found.cells, "totals": found.totals}
    if header["detail"]:
        arrays |= _gradients(job, begin, end)
    return packed(header, arrays)


def _gradients(job: Job, begin: float, end: float) -> dict[str, np.ndarray]:
    """Returns the single gradients of a window, with times in seconds after its begin."""
    first, last = job.levels.rows(begin, end)
    updates, offsets = job.timeline.updates[first:last], job.timeline.updates.offsets
    rows = job.timeline.contributions[offsets[first] : offsets[last]]
    made = np.repeat(updates.time - begin, updates.count)
    # By their start: the page takes the gradients of a worker to follow each other.
    order = np.argsort(made + rows.start, kind="stable")
    rows, made, step = rows[order], made[order], np.repeat(updates.step, updates.count)[order]
    return {
        "worker": rows.worker.astype(np.int32),
        "start": (made + rows.start).astype(np.float32),
        "arrival": (made + rows.arrival).astype(np.float32),
        "update": made.astype(np.float32),
        "step": step.astype(np.int32),
        "outcome": rows.outcome.astype(np.int32),
        "staleness": rows.staleness.astype(np.int32),
        "held": rows.held,
        "input": rows.input,
        "reduce": np.repeat(updates.reduce, updates.count)[order],
        "weight": rows.weight,
        "update_time": (updates.time - begin).astype(np.float32),
        "update_step": updates.step.astype(np.int32),
    }


def packed(header: dict[str, Any], arrays: dict[str, np.ndarray]) -> bytes:
    """Packs arrays of four-byte numbers behind a JSON header.

    The block is: length of the header (uint32, little endian), the header, spaces up to a multiple of four, then the
    arrays one after the other. The header's "arrays" lists name, "f" or "i", and shape of each.
    """
    layout = [{"name": name, "kind": array.dtype.kind, "shape": array.shape} for name, array in arrays.items()]
    text = json.dumps({**header, "arrays": layout}, allow_nan=False).encode()
    text += b" " * (-len(text) % 4)
    parts = [np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes() for array in arrays.values()]
    return b"".join([struct.pack("<I", len(text)), text, *parts])


def unpacked(block: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Returns the inverse of `packed`."""
    (length,) = struct.unpack_from("<I", block)
    header = json.loads(block[4 : 4 + length])
    place, arrays = 4 + length, {}
    for each in header["arrays"]:
        size = int(np.prod(each["shape"], dtype=np.int64))
        arrays[each["name"]] = np.frombuffer(block, f"<{each['kind']}4", size, place).reshape(each["shape"])
        place += 4 * size
    return header, arrays
