# SPDX-License-Identifier: Apache-2.0
"""Delay injection: a replica sleeps before it computes a contribution. The sleep ends when the injection is stopped."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping
from typing import Any

from tfdist import _checks
from tfdist.coordination import delay_hook
from tfdist.planning.simulation.delay_distributions import DelayDistribution

EVERYBODY = "*"
_WORKER = re.compile(r"worker:(\d+)")


class Delays:
    """Delays the contributions of replicas while the block runs.

        with tfdist.testing.Delays({"worker:1": tfdist.testing.lognormal(mean=0.2, s=1.0)}):
            model.fit(...)

    "worker:1" is replica 1 of the job, as in `strategy.report()`. The delays apply in this process. Under
    ParameterServerStrategy and MirroredStrategy, the program with `fit` installs them for all replicas. Under
    MultiWorkerMirroredStrategy, each worker's program installs them, and applies those of its own replicas.

    Args:
      delays: a distribution for all replicas, or distributions by worker; "*" stands for all other workers.
      seed: seed of the random delays.

    Raises:
      ValueError: a value is no distribution, or a key is no worker.
    """

    def __init__(self, delays: DelayDistribution | Mapping[str, DelayDistribution], seed: int = 0) -> None:
        if not _checks.is_int(seed):
            raise ValueError(f"Delays(seed=...) must be an integer. Received: seed={seed!r}")
        self.seed = seed
        self.distributions: dict[str, DelayDistribution] = (
            {EVERYBODY: delays} if isinstance(delays, DelayDistribution) else dict(delays)
        )
        for name, each in self.distributions.items():
            if not isinstance(each, DelayDistribution):
                raise ValueError(
                    f"Delays({{{name!r}: ...}}) must be a distribution such as tfdist.testing.constant(0.1). "
                    f"Received: {each!r}"
                )
        self._by_replica = {_replica(name): each for name, each in self.distributions.items() if name != EVERYBODY}
        self._stopped: threading.Event | None = None

    def secs(self, replica: int, attempt: int) -> float:
        """Returns the delay in seconds of the `attempt`-th contribution (from 0) of `replica`; also for simulators."""
        distribution = self._by_replica.get(replica, self.distributions.get(EVERYBODY))
        return distribution.draw(self.seed, replica, attempt) if distribution else 0.0

    def start(self) -> Delays:
        """Starts the injection; does nothing if it has started.

        Raises:
          RuntimeError: other delays are installed.
        """
        if self._stopped is None:
            delay_hook.set_hook(self._sleep)
            # After the hook, so that a failed installation leaves the object stopped.
            self._stopped = threading.Event()
        return self

    def stop(self) -> None:
        """Stops the injection, and wakes sleeping replicas."""
        if self._stopped is not None:
            delay_hook.uninstall(self._sleep)
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
        """Returns the equivalent value of the environment variable TFDIST_TEST_DELAYS."""
        return json.dumps({**{name: each.to_dict() for name, each in self.distributions.items()}, "seed": self.seed})

    @classmethod
    def from_json(cls, text: str, name: str = "Delays.from_json(text)") -> Delays:
        """Parses the result of `to_json`.

            {"worker:1": {"distribution": "lognormal", "mean": 0.2, "s": 1.0}, "seed": 0}

        Args:
          text: the JSON text.
          name: name of the text in error messages.

        Raises:
          ValueError: the text is invalid.
        """
        try:
            given = json.loads(text)
        except ValueError as error:
            raise ValueError(f"{name} must be JSON: {error}. Received: {text!r}") from None
        if not isinstance(given, dict):
            raise ValueError(f"{name} must be a JSON object, of distributions by worker. Received: {text!r}")
        seed = given.pop("seed", 0)
        try:
            return cls({worker: DelayDistribution.from_dict(form) for worker, form in given.items()}, seed)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None


def delays(delays: DelayDistribution | Mapping[str, DelayDistribution], seed: int = 0) -> Delays:
    """Builds and starts `Delays`, for use without a `with` block; end them with `stop`."""
    return Delays(delays, seed).start()


def _replica(name: Any) -> int:
    match = _WORKER.fullmatch(name) if isinstance(name, str) else None
    if match is None:
        raise ValueError(f'delays are given for "worker:0" and so on, or "*" for all. Received: {name!r}')
    return int(match[1])
