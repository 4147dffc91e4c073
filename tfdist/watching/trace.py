# SPDX-License-Identifier: Apache-2.0
"""`tfdist trace`: writes the timeline of a run as a file for Perfetto or chrome://tracing. No TensorFlow."""

from __future__ import annotations

import gzip
import json
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import IO, Any

import numpy as np
from absl import flags

from tfdist import _files, _log
from tfdist.launchers.requests import LaunchError
from tfdist.telemetry import report
from tfdist.telemetry.update_log import Contributions, EventKind, LogReader, Outcome, Timeline, Updates
from tfdist.watching import arguments as command_arguments
from tfdist.watching.arguments import chosen, name_of
from tfdist.watching.snapshot import Lanes

_COMMAND = "tfdist trace"
_USAGE = """\
usage: tfdist trace LOGDIR -o FILE [FLAGS]

Writes the timeline of the run below LOGDIR that began last, in the Trace Event Format: open FILE at
https://ui.perfetto.dev (nothing is uploaded) or in chrome://tracing. FILE is compressed if its name ends with .gz.
Of a large log the last updates are written, unless --from_step or --to_step says which.

flags:
"""
# Gradients that a browser shows without effort: about 50 MB of text.
_MAX_GRADIENTS = 200_000


def main(arguments: Sequence[str]) -> int:
    """Runs `tfdist trace`.

    Returns:
      0; 1 if there is no update log, or no update between the given steps.

    Raises:
      absl.flags.Error: a flag is unknown or its value can't be parsed.
      LaunchError: the command line makes no sense.
      OSError: the log can't be read, or the file can't be written.
    """
    values, directory = command_arguments.parse(_COMMAND, define_flags, arguments)
    if not directory:
        sys.stdout.write(command_arguments.describe(_USAGE, values))
        return 0
    _check(values)
    reading = LogReader(directory).read()
    for each in reading.skipped:
        _log.say(f"skipped {each.path}: {each.reason}")
    jobs = chosen(reading.timelines, directory, values.run)
    if not jobs:
        names = dict.fromkeys(name_of(each, directory) for each in reading.timelines)
        what = f" of the run {values.run!r}" if values.run is not None else ""
        _log.say(f"there is no update log{what} below {directory!r}; there are: {', '.join(names) or 'none'}")
        return 1
    spans = [_span(job, values.from_step, values.to_step) for job in jobs]
    if not any(first < last for first, last in spans):
        _log.say(_nothing(jobs, values))
        return 1
    if values.from_step is None and values.to_step is None:
        spans = _limited(jobs, spans)
    _say_steps(jobs, spans)
    size = write(values.output, jobs, spans, name_of(jobs[-1], directory))
    _log.say(f"wrote {values.output} ({size / 1e6:.1f} MB); open it at https://ui.perfetto.dev or in chrome://tracing")
    return 0


def define_flags(values: flags.FlagValues) -> None:
    """Defines the flags of `tfdist trace`."""
    output_help = "the file to write, such as trace.json or trace.json.gz"
    flags.DEFINE_string("output", None, output_help, short_name="o", flag_values=values)
    flags.DEFINE_string("run", None, "name of the run, or identifier of the job, to write", flag_values=values)
    flags.DEFINE_integer("from_step", None, "the first step to write", flag_values=values)
    flags.DEFINE_integer("to_step", None, "the last step to write", flag_values=values)


def _check(values: flags.FlagValues) -> None:
    if not values.output:
        raise LaunchError(f"{_COMMAND} needs a file to write; name it with -o trace.json. Received: no -o")
    if pathlib.Path(values.output).is_dir():
        raise LaunchError(f"-o names a directory; add the name of a file. Received: {values.output!r}")
    if not pathlib.Path(values.output).parent.is_dir():
        raise LaunchError(f"-o names a file in a directory that does not exist. Received: {values.output!r}")
    low, high = values.from_step, values.to_step
    if low is not None and high is not None and low > high:
        raise LaunchError(f"--from_step is after --to_step. Received: --from_step={low} --to_step={high}")


def write(path: str, jobs: Sequence[Timeline], spans: Sequence[tuple[int, int]], name: str) -> int:
    """Writes a trace. The file appears whole or not at all.

    Args:
      path: name of the file; with the end ".gz" it is compressed.
      jobs: the jobs, each a process of the trace.
      spans: for each job the index of its first update, and of the update behind its last one.
      name: name of the run.

    Returns:
      The size of the file in bytes.
    """
    chosen = [(job, *span) for job, span in zip(jobs, spans, strict=True) if span[0] < span[1]]
    titles = [
        f"{name} {job.header.strategy}".strip() + (f" {job.job}" if len(chosen) > 1 else "") for job, *_ in chosen
    ]
    # Differences of Unix times are small numbers: microseconds of a Unix time exceed the precision of a float.
    reference = chosen[0][0].origin_secs
    shifts = [job.origin_secs - reference for job, *_ in chosen]
    begin = min(s + TraceEvents(*each, 0, "", 0.0).begin for s, each in zip(shifts, chosen, strict=True))
    events = [
        TraceEvents(*each, number, title, shift - begin)
        for number, (each, title, shift) in enumerate(zip(chosen, titles, shifts, strict=True), 1)
    ]
    other = {
        "run": name,
        "origin_unix_secs": reference + begin,
        "jobs": [{"job": job.job, "policies": list(job.header.policies)} for job, *_ in chosen],
    }
    target = pathlib.Path(path)
    with _files.opened(target, permissions=0o644) as file:
        _write_text(file, encoded(events, other), is_compressed=target.suffix == ".gz")
    return target.stat().st_size


def _write_text(file: IO[bytes], parts: Iterator[str], is_compressed: bool) -> None:
    if not is_compressed:
        file.writelines(part.encode() for part in parts)
        return
    with gzip.GzipFile(filename="", mode="wb", fileobj=file, compresslevel=6, mtime=0) as packed:
        for part in parts:
            packed.write(part.encode())


def _span(job: Timeline, from_step: int | None, to_step: int | None) -> tuple[int, int]:
    """Returns the indices of the first update, and of the update behind the last one, between two steps."""
    step = job.updates.step
    chosen = np.full(len(step), True)
    if from_step is not None:
        chosen &= step >= from_step
    if to_step is not None:
        chosen &= step <= to_step
    found = np.flatnonzero(chosen)
    return (int(found[0]), int(found[-1]) + 1) if len(found) else (0, 0)


def _limited(jobs: Sequence[Timeline], spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Leaves out the oldest updates, so that at most `_MAX_GRADIENTS` gradients are left."""
    left, limited = _MAX_GRADIENTS, []
    for job, (first, last) in reversed(list(zip(jobs, spans, strict=True))):
        offsets = job.updates.offsets
        # At least one update of the newest job.
        least = last - 1 if not limited and last > first else last
        first = min(max(first, int(np.searchsorted(offsets, offsets[last] - left))), max(least, 0))
        left = max(0, left - int(offsets[last] - offsets[first]))
        limited.append((first, last))
    return limited[::-1]


def _say_steps(jobs: Sequence[Timeline], spans: Sequence[tuple[int, int]]) -> None:
    written = sum(last - first for first, last in spans)
    in_detail, total = sum(len(job.updates) for job in jobs), sum(job.num_updates for job in jobs)
    newest, (first, last) = next(
        (job, span) for job, span in zip(reversed(jobs), reversed(spans), strict=True) if span[0] < span[1]
    )
    steps = f"steps {newest.updates.step[first]} to {newest.updates.step[last - 1]}"
    text = f"{written:,} of {total:,} updates, {steps}"
    if total > in_detail:
        text += f"; the log has the {total - in_detail:,} oldest as sums only, which have no timeline"
    if written < in_detail:
        text += "; --from_step and --to_step choose others"
    _log.say(text)


def _nothing(jobs: Sequence[Timeline], values: flags.FlagValues) -> str:
    steps = [each.updates.step for each in jobs if len(each.updates)]
    if not steps:
        return "the update log has no update in detail yet"
    known = f"steps {min(each.min() for each in steps)} to {max(each.max() for each in steps)}"
    received = [f"--{name}={values[name].value}" for name in ("from_step", "to_step") if values[name].value is not None]
    return f"no update is between these steps; the log has {known} in detail. Received: {' '.join(received)}"


# Converts a timeline into events of the Trace Event Format, which Perfetto and chrome://tracing load.
#
# Format: "Trace Event Format" of the Chromium authors, object form; times are microseconds. A job is a process. Its
# lane (thread) 0 has an instant event for each update. Each worker has a lane with slices (complete events): held back,
# computing, waiting. Gradients that were dropped or lost are instant events there.


_MAX_POINTS = 2000
_MICROSECONDS = 1e6
_COMPUTE = {Outcome.ACCEPTED: "compute", Outcome.DROPPED: "compute (dropped)", Outcome.LOST: "compute (lost)"}
_KINDS = {
    EventKind.LOST: "lost",
    EventKind.RETURNED: "returned",
    EventKind.POLICY_CHANGED: "policy changed",
    EventKind.PHASE_CHANGED: "phase changed",
    EventKind.RESUMED: "resumed from a checkpoint",
    EventKind.RESTARTED: "restarted",
    EventKind.VALIDATION: "validation",
    EventKind.CHECKPOINT: "checkpoint",
    EventKind.FINISHED: "end",
}


class TraceEvents:
    """Events of one job.

    Args:
      timeline: the job.
      first, last: indices of the first update, and of the update behind the last one.
      pid: number of the process in the trace.
      name: name of the process.
      shift_secs: seconds that are added to the times of the timeline.
    """

    def __init__(self, timeline: Timeline, first: int, last: int, pid: int, name: str, shift_secs: float) -> None:
        offsets = timeline.updates.offsets
        self._timeline = timeline
        self._pid = pid
        self._name = name
        self._updates: Updates = timeline.updates[first:last]
        self._contributions: Contributions = timeline.contributions[int(offsets[first]) : int(offsets[last])]
        self._lanes = Lanes.of(self._updates, self._contributions)
        self._shift = shift_secs

    @property
    def begin(self) -> float:
        """Time of the earliest event on the clock of the timeline; inf without updates."""
        begins = [self._updates.time - self._updates.opened, self._lanes.held]
        return min((float(each.min()) for each in begins if len(each)), default=np.inf)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yields the events: those of a lane, and those of a counter, in the order of time."""
        yield from self._names()
        yield from self._update_lane()
        for worker in range(len(self._timeline.workers)):
            yield from self._worker_lane(worker)
        yield from self._counters()

    def _names(self) -> Iterator[dict[str, Any]]:
        yield self._metadata("process_name", 0, name=self._name)
        found = report.of_log(self._updates, self._contributions, self._timeline.workers)
        yield self._metadata("process_labels", 0, labels=found.in_words)
        for tid, name in enumerate(("updates", *self._timeline.workers)):
            yield self._metadata("thread_name", tid, name=name)
            yield self._metadata("thread_sort_index", tid, sort_index=tid)

    def _metadata(self, title: str, tid: int, **values: Any) -> dict[str, Any]:
        return {"name": title, "ph": "M", "pid": self._pid, "tid": tid, "args": values}

    def _update_lane(self) -> Iterator[dict[str, Any]]:
        updates = self._updates
        columns = (updates.time, updates.step, updates.wait, updates.examples, updates.phase, updates.count)
        events = []
        for time, step, wait, examples, phase, count in zip(*(each.tolist() for each in columns), strict=True):
            values = {"step": step, "wait_ms": round(wait * 1e3, 3), "examples": examples, "gradients": count}
            events.append(self._instant("update", time, 0, {**values, **({"phase": "warmup"} if phase else {})}))
        yield from _by_time([*events, *self._log_events(-1)])

    def _log_events(self, worker: int) -> Iterator[dict[str, Any]]:
        """Yields the log's events of a worker; -1: those of the policy, or of all."""
        events, updates, known = self._timeline.events, self._updates, set(EventKind)
        if not len(updates):
            return
        begin, end = float(updates.time[0] - updates.opened[0]), float(updates.time.max())
        chosen = (events.event_worker == worker) & (events.event_time >= begin) & (events.event_time <= end)
        for index in np.flatnonzero(chosen):
            kind = int(events.event_kind[index])
            name = _KINDS[EventKind(kind)] if kind in known else f"event {kind}"
            text = {"text": str(events.event_text[index])}
            time, secs = float(events.event_time[index]), float(events.event_secs[index])
            if secs > 0:
                yield from self._slice(name, time, time + secs, worker + 1, text)
            else:
                yield self._instant(name, time, worker + 1, text, "t" if worker >= 0 else "p")

    def _worker_lane(self, worker: int) -> Iterator[dict[str, Any]]:
        lanes, gradients = self._lanes, self._contributions
        low, high = np.searchsorted(lanes.worker, [worker, worker + 1]).tolist()
        rows = lanes.row[low:high]
        columns = (
            *(each[low:high] for each in lanes.limits),
            self._updates.step[lanes.update[low:high]],
            *(each[rows] for each in (gradients.outcome, gradients.staleness, gradients.weight)),
        )
        events = list(self._log_events(worker))
        for held, start, read, arrival, summing, end, step, code, staleness, weight in zip(
            *(each.tolist() for each in columns), strict=True
        ):
            outcome = Outcome(code) if code in _COMPUTE else Outcome.LOST
            values = {"update": step, "staleness": staleness, "weight": round(weight, 6)}
            events.extend(self._slice("held", held, start, worker + 1, {"update": step}))
            events.extend(self._slice("input", start, read, worker + 1, {"update": step}))
            events.extend(self._slice(_COMPUTE[outcome], read, arrival, worker + 1, values))
            events.extend(self._slice("wait", arrival, summing, worker + 1, {"update": step}))
            events.extend(self._slice("all-reduce", summing, end, worker + 1, {"update": step}))
            if outcome != Outcome.ACCEPTED:
                name = "gradient dropped" if outcome == Outcome.DROPPED else "gradient lost"
                events.append(self._instant(name, arrival, worker + 1, values))
        yield from _by_time(events)

    def _counters(self) -> Iterator[dict[str, Any]]:
        """Yields updates per second, and staleness, at up to 2,000 moments."""
        updates, gradients = self._updates, self._contributions
        if not len(updates):
            return
        begin, end = float(updates.time[0] - updates.opened[0]), float(updates.time.max())
        count = min(_MAX_POINTS, max(1, len(updates) // 4))
        width = max(end - begin, 1e-6) / count
        place = np.clip(((updates.time - begin) / width).astype(int), 0, count - 1)
        rates = np.bincount(place, minlength=count) / width
        is_accepted = gradients.outcome == Outcome.ACCEPTED
        of_update = np.repeat(place, updates.count)[is_accepted]
        staleness = gradients.staleness[is_accepted]
        sizes = np.bincount(of_update, minlength=count)
        means = np.bincount(of_update, staleness, count) / np.maximum(sizes, 1)
        largest = np.zeros(count, np.int64)
        np.maximum.at(largest, of_update, staleness)
        for name, values in (("updates/s", rates), ("staleness mean", means), ("staleness max", largest)):
            for index, value in enumerate(values.tolist()):
                yield {
                    "name": name,
                    "ph": "C",
                    "ts": self._ts(begin + index * width),
                    "pid": self._pid,
                    "tid": 0,
                    "args": {name.rpartition(" ")[2]: round(value, 4)},
                }

    def _ts(self, time: float) -> float:
        return round(max(0.0, time + self._shift) * _MICROSECONDS, 3)

    def _slice(self, name: str, begin: float, end: float, tid: int, values: dict[str, Any]) -> list[dict[str, Any]]:
        ts, until = self._ts(begin), self._ts(end)
        if until <= ts:
            return []
        where = {"ts": ts, "dur": round(until - ts, 3), "pid": self._pid, "tid": tid}
        return [{"name": name, "cat": "gradient", "ph": "X", **where, "args": values}]

    def _instant(self, name: str, time: float, tid: int, values: dict[str, Any], scope: str = "t") -> dict[str, Any]:
        where = {"ts": self._ts(time), "pid": self._pid, "tid": tid}
        return {"name": name, "cat": "event", "ph": "i", "s": scope, **where, "args": values}


def _by_time(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(events, key=lambda event: event["ts"])


def encoded(jobs: list[TraceEvents], other: dict[str, Any]) -> Iterator[str]:
    """Yields the text of a trace: one event on each line."""
    yield f'{{"displayTimeUnit":"ms","otherData":{json.dumps(other)},"traceEvents":['
    separator = "\n"
    for job in jobs:
        for event in job:
            yield separator + json.dumps(event, separators=(",", ":"), allow_nan=False)
            separator = ",\n"
    yield "\n]}\n"
