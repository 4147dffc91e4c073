# SPDX-License-Identifier: Apache-2.0
"""A segment of an update log: consecutive updates with all that happened meanwhile, as the bytes of one file."""

from __future__ import annotations

import dataclasses
import io
import zipfile
from collections.abc import Sequence
from typing import Self

import numpy as np

from tfdist.telemetry.update_log.columns import Columns, Contributions, Events, Scalars, Updates

# A segment that has as many is full, and its file is not written again.
FULL = {"updates": 4096, "contributions": 16_384, "events": 1000, "scalars": 16_384}
SUFFIX = ".npz"
_KINDS = {"updates": Updates, "contributions": Contributions, "events": Events, "scalars": Scalars}


@dataclasses.dataclass(frozen=True)
class Segment:
    """Content of a file. `first` is the index of its first update in the log, from 0."""

    first: int
    updates: Updates
    contributions: Contributions
    events: Events
    scalars: Scalars

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Joins consecutive segments."""
        joined = {name: kind.concatenated([getattr(each, name) for each in parts]) for name, kind in _KINDS.items()}
        return cls(parts[0].first if parts else 0, **joined)  # type: ignore[arg-type]

    def columns(self) -> dict[str, Columns]:
        """Returns the four kinds of rows by their names."""
        return {name: getattr(self, name) for name in FULL}

    @property
    def is_full(self) -> bool:
        """True if it has more of anything than a file is to have."""
        return any(len(rows) >= FULL[name] for name, rows in self.columns().items())

    def cut(self, updates: int) -> tuple[Self, Self]:
        """Returns the first updates, with all events and scalars, and the other updates."""
        gradients = int(self.updates.offsets[updates])
        head = dataclasses.replace(self, updates=self.updates[:updates], contributions=self.contributions[:gradients])
        rest = self.updates[updates:], self.contributions[gradients:], self.events[:0], self.scalars[:0]
        return head, type(self)(self.first + updates, *rest)

    def encoded(self) -> bytes:
        """Returns a NumPy archive, deflated."""
        buffer = io.BytesIO()
        # The lowest level packs times nearly as well as the others, in a third of the time.
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
            arrays = {"first": np.asarray(self.first, np.int64)}
            for rows in self.columns().values():
                arrays |= rows.arrays()
            for name, array in arrays.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                    np.lib.format.write_array(file, array, allow_pickle=False)
        return buffer.getvalue()

    @classmethod
    def decoded(cls, data: bytes, workers: int) -> Self:
        """Reads the content of a file.

        Raises:
          ValueError: it is damaged, or not of this format; the message says why.
        """
        try:
            with np.load(io.BytesIO(data), allow_pickle=False) as archive:
                arrays = {name: archive[name] for name in archive.files}
            columns = {name: _checked(kind, arrays) for name, kind in _KINDS.items()}
            found = cls(int(arrays["first"]), **columns)  # type: ignore[arg-type]
        except Exception as error:
            # NumPy and zipfile raise many kinds of exceptions for damaged bytes.
            raise ValueError(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__) from error
        if np.any(found.updates.count < 0) or found.updates.count.sum(dtype=np.int64) != len(found.contributions):
            raise ValueError(f"'count' is not the number of contributions, {len(found.contributions)}")
        if len(found.contributions) and found.contributions.worker.max() >= workers:
            raise ValueError(f"it has a worker {found.contributions.worker.max()}, and log.json has {workers}")
        return found


def _checked(kind: type[Columns], arrays: dict[str, np.ndarray]) -> Columns:
    columns = kind(**{name: arrays[name] for name in kind.dtypes()})
    for name, array in columns.arrays().items():
        expected = np.dtype(kind.dtypes()[name])
        if array.dtype.kind != expected.kind or (expected.kind != "U" and array.dtype != expected):
            raise ValueError(f"column {name!r} is of dtype {array.dtype}, not {expected}")
        if array.ndim != 1 or len(array) != len(columns):
            raise ValueError(f"column {name!r} has another length than the others")
        if expected.kind == "f" and not np.isfinite(array).all():
            raise ValueError(f"column {name!r} has a number that is not finite")
    return columns
