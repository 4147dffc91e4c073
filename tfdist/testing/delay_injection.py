# SPDX-License-Identifier: Apache-2.0
"""Delays of chosen replicas: sleeps before a contribution is computed, which end when the injection is stopped."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping
from typing import Any

from tfdist.engines import injection
from tfdist.testing import laws

EVERYBODY = "*"
_WORKER = re.compile(r"worker:(\d+)")


class Delays:
    """Makes contributions take longer, for as long as the block runs.

        with tfdist.testing.Delays({"worker:1": tfdist.testing.lognormal(mean=0.2, s=1.0)}):
            model.fit(...)

    "worker:1" is replica 1 of the job, as in `strategy.report()`. The delays hold in this process: under
    ParameterServerStrategy and MirroredStrategy that is the program with `fit`, for all replicas; under
    MultiWorkerMirroredStrategy each worker's program installs them, and each takes those of its own replicas.

    Args:
      delays: a law for everybody, or laws by worker; "*" stands for all that are not named.
      seed: for other delays of the same law.

    Raises:
      ValueError: this is no law, or no worker.
    """

    def __init__(self, delays: laws.Law | Mapping[str, laws.Law], seed: int = 0) -> None:
        if not isinstance(seed, int) or isinstance(seed, bool):
            raise ValueError(f"Delays(seed=...) must be an integer. Received: seed={seed!r}")
        self.seed = seed
        self.laws: dict[str, laws.Law] = {EVERYBODY: delays} if isinstance(delays, laws.Law) else dict(delays)
        for name, law in self.laws.items():
            if not isinstance(law, laws.Law):
                raise ValueError(
                    f"Delays({{{name!r}: ...}}) must be a law such as tfdist.testing.constant(0.1). Received: {law!r}"
                )
        self._by_replica = {_replica(name): law for name, law in self.laws.items() if name != EVERYBODY}
        self._stopped: threading.Event | None = None

    def secs(self, replica: int, attempt: int) -> float:
        """The delay of the `attempt`-th contribution (from 0) of `replica`, in seconds; for a simulator too."""
        law = self._by_replica.get(replica, self.laws.get(EVERYBODY))
        return law.draw(self.seed, replica, attempt) if law else 0.0

    def start(self) -> Delays:
        """Begins, if it has not begun.

        Raises:
          RuntimeError: other delays are at work.
        """
        if self._stopped is None:
            injection.install(self._sleep)
            # A contribution that begins in between is not delayed.
            self._stopped = threading.Event()
        return self

    def stop(self) -> None:
        """Ends, and wakes those who sleep."""
        if self._stopped is not None:
            injection.uninstall(self._sleep)
            self._stopped.set()
            self._stopped = None

    def _sleep(self, replica: int, attempt: int) -> None:
        stopped, secs = self._stopped, self.secs(replica, attempt)
        if stopped is not None and secs > 0:
            stopped.wait(secs)

    def __enter__(self) -> Delays:
        return self.start()

    def __exit__(self, *exception: Any) -> None:
        self.stop()

    def to_json(self) -> str:
        """The value of TFDIST_TEST_DELAYS that means the same."""
        return json.dumps({**{name: law.to_dict() for name, law in self.laws.items()}, "seed": self.seed})

    @classmethod
    def from_json(cls, text: str, name: str = "Delays.from_json(text)") -> Delays:
        """Reads what `to_json` has written.

            {"worker:1": {"law": "lognormal", "mean": 0.2, "s": 1.0}, "*": {"law": "constant", "secs": 0.01}, "seed": 0}

        Args:
          text: JSON.
          name: what the text is called in errors.

        Raises:
          ValueError: the text is not that.
        """
        try:
            given = json.loads(text)
        except ValueError as error:
            raise ValueError(f"{name} must be JSON: {error}. Received: {text!r}") from None
        if not isinstance(given, dict):
            raise ValueError(f"{name} must be a JSON object, of laws by worker. Received: {text!r}")
        seed = given.pop("seed", 0)
        try:
            return cls({worker: laws.Law.from_dict(law) for worker, law in given.items()}, seed)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None


def delays(delays: laws.Law | Mapping[str, laws.Law], seed: int = 0) -> Delays:
    """`Delays` that have begun, for where no block fits: end them with `stop`."""
    return Delays(delays, seed).start()


def _replica(name: Any) -> int:
    match = _WORKER.fullmatch(name) if isinstance(name, str) else None
    if match is None:
        raise ValueError(f'delays are given for "worker:0" and so on, or "*" for all. Received: {name!r}')
    return int(match[1])
