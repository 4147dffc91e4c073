# SPDX-License-Identifier: Apache-2.0
"""The profile of a training script on one device: its format, and checks of what is read.

A profile says how long a step takes at several batch sizes, and what a step would send if there were more devices.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from tfdist import _checks

FORMAT = "tfdist profile"
VERSION = 1
# Other programs make a machine busy from this share of its cores on.
BUSY = 0.1
_TEXTS = ("noise_reason", "script", "model", "strategy", "device", "fastest_worker")


class ProfileError(ValueError):
    """A profile that can't be read. The message is one line."""


@dataclasses.dataclass(frozen=True)
class MeasuredSteps:
    """Measured seconds of single train steps at one batch size."""

    batch_size: int
    secs: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Table:
    """An embedding table whose gradient has rows: all its rows, bytes of a row, and rows of one step's gradient."""

    name: str
    rows: int
    row_bytes: int
    rows_per_step: float


@dataclasses.dataclass(frozen=True)
class NoiseScale:
    """The gradient noise scale B_simple in examples, and the bounds of its 90 % interval; infinite if unbounded.

    McCandlish et al. 2018, An empirical model of large-batch training, arXiv 1812.06162, equation 2.9 and appendix A.1.
    """

    value: float
    low: float
    high: float
    batches: int

    @property
    def is_known(self) -> bool:
        """False if the interval excludes nothing."""
        return self.low > 0 or self.high < math.inf


@dataclasses.dataclass(frozen=True)
class Profile:
    """Measurements of `tfdist profile`.

    Attributes:
      batch_size: examples of a step of the script, over all replicas together.
      steps: train steps alone, on batches that are in memory, by batch size.
      fit_secs: steps of `fit`, with reading its data.
      variables: trainable variables.
      dense_bytes: bytes of the gradients that are sent whole.
      trainable_bytes: bytes of all trainable variables.
      optimizer_bytes: bytes of the optimizer's variables.
      tables: embedding tables with sparse gradients.
      flops_per_example: of the forward and backward pass; None if unknown.
      noise_scale: None if unknown; `noise_reason` says why.
      noise_reason: see `measuring`.
      script: name of the script.
      model: name of the model.
      strategy: strategy that the script builds, as text; "" for none.
      device: kind of the device.
      cores: cores that the process could use; 0 if unknown.
      cpu_secs: CPU time of a step of `fit`, over all cores; 0 if unknown.
      other_cores: mean number of cores that other programs used meanwhile; 0 if unknown.
      runnable: mean number of threads that ran or waited for a core meanwhile; 0 if unknown.
      fastest_secs: steps of the fastest worker, if `samples` are of several workers; empty if they are of one device.
      fastest_worker: name of that worker.
    """

    batch_size: int
    steps: tuple[MeasuredSteps, ...]
    fit_secs: tuple[float, ...] = ()
    variables: int = 1
    dense_bytes: int = 0
    trainable_bytes: int = 0
    optimizer_bytes: int = 0
    tables: tuple[Table, ...] = ()
    flops_per_example: float | None = None
    noise_scale: NoiseScale | None = None
    noise_reason: str = ""
    script: str = ""
    model: str = ""
    strategy: str = ""
    device: str = "CPU"
    cores: int = 0
    cpu_secs: float = 0.0
    other_cores: float = 0.0
    runnable: float = 0.0
    fastest_secs: tuple[float, ...] = ()
    fastest_worker: str = ""

    @property
    def samples(self) -> tuple[float, ...]:
        """Seconds of single steps at the script's batch size: of `fit`, unless there are more of the step alone."""
        alone = next((each.secs for each in self.steps if each.batch_size == self.batch_size), ())
        return alone if len(alone) > len(self.fit_secs) else self.fit_secs

    @property
    def alone(self) -> tuple[float, ...]:
        """Seconds of single steps of one device: of the fastest, where several were measured."""
        return self.fastest_secs or self.samples

    @property
    def is_busy(self) -> bool:
        """True if other programs were busy on the machine that was measured."""
        return self.other_cores > BUSY * self.cores

    @property
    def used_cores(self) -> float:
        """Cores that a step keeps busy on average; 0 if unknown.

        On a busy machine those that it would use alone: less the time in which its threads waited for a core.
        """
        if not self.fit_secs or not self.cpu_secs:
            return 0.0
        secs = statistics.fmean(self.fit_secs)
        if self.is_busy:
            waited = max(0.0, self.runnable * secs - self.cpu_secs)
            secs -= waited / max(1.0, self.runnable)
        return min(self.cores, self.cpu_secs / secs)

    @property
    def busy_in_words(self) -> str:
        """One line about a busy machine; "" for one that was not."""
        used = f"other programs used {self.other_cores:.1f} of {self.cores} cores"
        return f"{used}: the profile is of a busy machine" if self.is_busy else ""

    def to_json(self) -> str:
        """Returns the content of a profile's file."""
        return json.dumps({"format": FORMAT, "version": VERSION, **dataclasses.asdict(self)}, indent=1) + "\n"


def load(path: pathlib.Path) -> Profile:
    """Reads a profile.

    Raises:
      ProfileError: the file can't be read, or is no profile of this version.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ProfileError(f"can't read the profile {path}: {error}; write one with tfdist profile SCRIPT") from None
    return from_json(text, str(path))


def from_json(text: str, name: str = "profile") -> Profile:
    """Parses the content of a profile's file.

    Raises:
      ProfileError: it is no profile of this version.
    """
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ProfileError(f"{name} is no JSON ({error}); write one with tfdist profile SCRIPT") from None
    if not isinstance(given, dict) or given.get("format") != FORMAT:
        raise ProfileError(f"{name} is no profile of tfdist; write one with tfdist profile SCRIPT")
    if given.get("version") != VERSION:
        raise ProfileError(
            f"{name} is a profile of version {given.get('version')!r}, and this tfdist reads version {VERSION}; write "
            "it again with tfdist profile SCRIPT"
        )
    return _Reader(name).profile(given)


class _Reader:
    """Checks each value, and names the key of the first that is invalid."""

    def __init__(self, name: str) -> None:
        self._name = name

    def profile(self, given: Mapping[str, Any]) -> Profile:
        steps = tuple(
            MeasuredSteps(self._count(each, "batch_size", 1), self._secs(each, "secs"))
            for each in self._list(given, "steps")
        )
        fit_secs = self._secs(given, "fit_secs") if given.get("fit_secs") else ()
        if not steps and not fit_secs:
            raise self._error("steps", [], "a list with at least one batch size")
        flops = given.get("flops_per_example")
        texts = {key: str(given.get(key, "")) for key in _TEXTS}
        return Profile(
            batch_size=self._count(given, "batch_size", 1),
            steps=steps,
            fit_secs=fit_secs,
            variables=self._count(given, "variables", 0),
            dense_bytes=self._count(given, "dense_bytes", 0),
            trainable_bytes=self._count(given, "trainable_bytes", 0),
            optimizer_bytes=self._count(given, "optimizer_bytes", 0),
            tables=tuple(map(self._table, self._list(given, "tables"))),
            flops_per_example=None if flops is None else self._number(given, "flops_per_example"),
            noise_scale=self._noise(given.get("noise_scale")),
            # Profiles of earlier versions lack the next ones.
            cores=self._count(given, "cores", 0) if "cores" in given else 0,
            cpu_secs=self._number(given, "cpu_secs") if "cpu_secs" in given else 0.0,
            other_cores=self._number(given, "other_cores") if "other_cores" in given else 0.0,
            runnable=self._number(given, "runnable") if "runnable" in given else 0.0,
            fastest_secs=self._secs(given, "fastest_secs") if given.get("fastest_secs") else (),
            **texts,
        )

    def _table(self, given: Mapping[str, Any]) -> Table:
        rows, row_bytes = self._count(given, "rows", 1), self._count(given, "row_bytes", 1)
        return Table(str(given.get("name", "")), rows, row_bytes, self._number(given, "rows_per_step"))

    def _noise(self, given: Any) -> NoiseScale | None:
        if given is None:
            return None
        if not isinstance(given, dict):
            raise self._error("noise_scale", given, "an object, or null")
        value, low, high = (self._number(given, key, is_finite=False) for key in ("value", "low", "high"))
        return NoiseScale(value, low, high, self._count(given, "batches", 1))

    def _list(self, given: Any, key: str) -> Sequence[Mapping[str, Any]]:
        found = given.get(key, [])
        if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
            raise self._error(key, found, "a list of objects")
        return found

    def _secs(self, given: Mapping[str, Any], key: str) -> tuple[float, ...]:
        found = given.get(key)
        if not isinstance(found, list) or not found or not all(_checks.is_number(each) and each > 0 for each in found):
            raise self._error(key, found, "a list of seconds above 0")
        return tuple(map(float, found))

    def _count(self, given: Mapping[str, Any], key: str, least: int) -> int:
        found = given.get(key)
        if not _checks.is_count(found, at_least=least):
            raise self._error(key, found, f"an integer of at least {least}")
        return found

    def _number(self, given: Mapping[str, Any], key: str, is_finite: bool = True) -> float:
        found: Any = given.get(key)
        if not _checks.is_number(found, is_finite=is_finite) or found < 0:
            raise self._error(key, found, "a number of at least 0")
        return float(found)

    def _error(self, key: str, found: Any, wanted: str) -> ProfileError:
        return ProfileError(f"{self._name}: {key} must be {wanted}. Received: {str(found)[:80]}")


# A profile from the update log of a run: the real arrivals of its gradients. docs/update_log.md has the format.
#
# A log has no bytes: the times until gradients arrived include sending them. So a prediction from a log holds for links
# like those of that run.


# Gradients at the beginning, of each worker, that trace and find caches cold.
_WARM_UP = 2
_MOST_SAMPLES = 4000
_LEAST_SAMPLES = 10


def load_log(directory: pathlib.Path) -> Profile:
    """Reads the logs below a directory.

    Raises:
      ProfileError: there is no log, or it has too few updates, or says nothing of examples.
    """
    from tfdist.telemetry import update_log  # needs NumPy, which other profiles don't

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
        steps=(MeasuredSteps(size, tuple(samples)),),
        noise_reason="an update log has no gradients",
        script=str(directory),
        model=f"run with {len(timeline.workers)} workers",
        strategy=header.strategy,
        fastest_secs=tuple(counted[fastest][:_MOST_SAMPLES]),
        fastest_worker=timeline.workers[fastest],
    )


def _accepted(timeline: object) -> list[int]:
    """Number of accepted gradients of each update."""
    from tfdist.telemetry import update_log

    counts = [0] * len(timeline.updates)  # type: ignore[attr-defined]
    outcomes = timeline.contributions.outcome  # type: ignore[attr-defined]
    for update, outcome in zip(timeline.update_of(), outcomes, strict=True):  # type: ignore[attr-defined]
        counts[update] += int(outcome == update_log.Outcome.ACCEPTED)
    return counts
