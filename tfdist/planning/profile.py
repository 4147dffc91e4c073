# SPDX-License-Identifier: Apache-2.0
"""The profile of a training script on one device: its format, and checks of what is read.

A profile says how long a step takes at several batch sizes, and what a step would send if there were more devices.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import statistics
from typing import Annotated, Any

from tfdist import _checks
from tfdist.launchers.requests import read_file
from tfdist.planning.simulation.models import Amount, Checked, Count, Index, must

FORMAT = "tfdist profile"
VERSION = 3
# Other programs make a machine busy from this share of its cores on.
BUSY = 0.1
# An interval whose bounds are further apart says nothing.
_MOST_SPREAD = 10.0
_AGAIN = "write one with tfdist profile SCRIPT"


# Seconds of single steps.
Secs = Annotated[
    tuple[float, ...],
    must("be numbers above 0", lambda value: all(_checks.is_number(each) and each > 0 for each in value)),
]


@dataclasses.dataclass(frozen=True)
class MeasuredSteps(Checked):
    """Measured seconds of single train steps at one batch size."""

    batch_size: Count
    secs: Secs


@dataclasses.dataclass(frozen=True)
class Table(Checked):
    """An embedding table whose gradient has rows: all its rows, bytes of a row, and rows of one step's gradient."""

    name: str
    rows: Index
    row_bytes: Index
    rows_per_step: Amount


@dataclasses.dataclass(frozen=True)
class NoiseScale(Checked):
    """The gradient noise scale B_simple in examples, and the bounds of its 90 % interval.

    McCandlish et al. 2018, An empirical model of large-batch training, arXiv 1812.06162, equation 2.9 and appendix A.1.
    """

    value: Amount
    low: Amount
    high: Amount

    def __str__(self) -> str:
        return f"gradient noise scale {self.value:.3g} examples ({self.low:.3g} to {self.high:.3g})"


@dataclasses.dataclass(frozen=True)
class Profile(Checked):
    """Measurements of `tfdist profile`.

    Attributes:
      batch_size: examples of a step of the script, over all replicas together.
      steps: train steps alone, on batches that are in memory, by batch size.
      fit_secs: steps of `fit`, with reading its data.
      dense_bytes: bytes of the gradients that are sent whole.
      trainable_bytes: bytes of all trainable variables.
      optimizer_bytes: bytes of the optimizer's variables.
      tables: embedding tables with sparse gradients.
      noise_scale: None if unknown, or if its interval is so wide that the number says nothing.
      script: name of the script.
      model: name of the model.
      device: kind of the device.
      cores: cores that the process could use; 0 if unknown.
      cpu_secs: CPU time of a step of `fit`, over all cores; 0 if unknown.
      other_cores: mean number of cores that other programs used meanwhile; 0 if unknown.
    """

    batch_size: Count
    steps: tuple[MeasuredSteps, ...]
    fit_secs: Secs = ()
    dense_bytes: Index = 0
    trainable_bytes: Index = 0
    optimizer_bytes: Index = 0
    tables: tuple[Table, ...] = ()
    noise_scale: NoiseScale | None = None
    script: str = ""
    model: str = ""
    device: str = "CPU"
    cores: Index = 0
    cpu_secs: Amount = 0.0
    other_cores: Amount = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.samples:
            raise ValueError("no step was measured")
        if self.noise_scale and not 0 < self.noise_scale.high < _MOST_SPREAD * self.noise_scale.low:
            object.__setattr__(self, "noise_scale", None)

    @property
    def samples(self) -> Secs:
        """Seconds of single steps at the script's batch size: of `fit`, unless there are more of the step alone."""
        alone = next((each.secs for each in self.steps if each.batch_size == self.batch_size), ())
        return alone if len(alone) > len(self.fit_secs) else self.fit_secs

    @property
    def step_secs(self) -> dict[int, float]:
        """Mean seconds of a step by batch size."""
        return {each.batch_size: statistics.fmean(each.secs) for each in self.steps} | {
            self.batch_size: statistics.fmean(self.samples)
        }

    @property
    def used_cores(self) -> float:
        """Cores that a step keeps busy on average; 0 if unknown. Fewer than alone, where other programs were busy."""
        return min(self.cores, self.cpu_secs / statistics.fmean(self.fit_secs)) if self.fit_secs else 0.0

    @property
    def busy_in_words(self) -> str:
        """One line about a busy machine; "" for one that was not."""
        if self.other_cores <= BUSY * self.cores:
            return ""
        return f"other programs used {self.other_cores:.1f} of {self.cores} cores: the profile is of a busy machine"

    def to_json(self) -> str:
        """Returns the content of a profile's file."""
        return json.dumps({"format": FORMAT, "version": VERSION, **dataclasses.asdict(self)}, indent=1) + "\n"


def load(path: pathlib.Path) -> Profile:
    """Reads a profile.

    Raises:
      ValueError: the file can't be read, or is no profile of this version. The message is one line.
    """
    return from_json(read_file("the profile", str(path), _AGAIN), str(path))


def from_json(text: str, name: str = "profile") -> Profile:
    """Parses the content of a profile's file; see `load`."""
    try:
        given: Any = json.loads(text)
        kind, version = given.pop("format", None), given.pop("version", None)
        if (kind, version) != (FORMAT, VERSION):
            raise ValueError(f"format {kind!r}, version {version!r}; this tfdist reads version {VERSION}")
        noise = given["noise_scale"]
        parts = {
            "steps": tuple(MeasuredSteps(each["batch_size"], tuple(each["secs"])) for each in given["steps"]),
            "fit_secs": tuple(given["fit_secs"]),
            "tables": tuple(Table(**each) for each in given["tables"]),
            "noise_scale": noise and NoiseScale(**noise),
        }
        return Profile(**{**given, **parts})
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"{name} is no whole {FORMAT} ({error}); {_AGAIN}") from None
