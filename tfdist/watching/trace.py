# SPDX-License-Identifier: Apache-2.0
"""`tfdist trace`: writes the timeline of a run as a file for Perfetto or chrome://tracing. No TensorFlow."""

from __future__ import annotations

import gzip
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import IO

import numpy as np
from absl import flags

from tfdist import _whole_files
from tfdist.launchers.requests import LaunchError
from tfdist.update_log import LogReader, Timeline
from tfdist.watching import arguments as command_arguments
from tfdist.watching import runs
from tfdist.watching.trace_events import TraceEvents, encoded

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
        _say(f"skipped {each.path}: {each.reason}")
    jobs = runs.chosen(reading.timelines, directory, values.run)
    if not jobs:
        names = dict.fromkeys(runs.name_of(each, directory) for each in reading.timelines)
        what = f" of the run {values.run!r}" if values.run is not None else ""
        _say(f"there is no update log{what} below {directory!r}; there are: {', '.join(names) or 'none'}")
        return 1
    spans = [_span(job, values.from_step, values.to_step) for job in jobs]
    if not any(first < last for first, last in spans):
        _say(_nothing(jobs, values))
        return 1
    if values.from_step is None and values.to_step is None:
        spans = _limited(jobs, spans)
    _say_steps(jobs, spans)
    size = write(values.output, jobs, spans, runs.name_of(jobs[-1], directory))
    _say(f"wrote {values.output} ({size / 1e6:.1f} MB); open it at https://ui.perfetto.dev or in chrome://tracing")
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
    with _whole_files.opened(target, permissions=0o644) as file:
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
    _say(text)


def _nothing(jobs: Sequence[Timeline], values: flags.FlagValues) -> str:
    steps = [each.updates.step for each in jobs if len(each.updates)]
    if not steps:
        return "the update log has no update in detail yet"
    known = f"steps {min(each.min() for each in steps)} to {max(each.max() for each in steps)}"
    received = [f"--{name}={values[name].value}" for name in ("from_step", "to_step") if values[name].value is not None]
    return f"no update is between these steps; the log has {known} in detail. Received: {' '.join(received)}"


def _say(text: str) -> None:
    sys.stderr.write(f"tfdist: {' '.join(text.split())}\n")
