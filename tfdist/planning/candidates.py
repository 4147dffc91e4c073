# SPDX-License-Identifier: Apache-2.0
"""The combinations of strategy and policies that are compared, with how many parameter servers and spares each has."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from tfdist.planning.simulation import CodecModel
from tfdist.policies import backup_workers
from tfdist.policies.backup_workers import BackupWorkers
from tfdist.policies.base import Policy
from tfdist.policies.compression import Compression
from tfdist.policies.parameter_averaging import ParameterAveraging

MULTI_WORKER, PARAMETER_SERVER = "MultiWorkerMirroredStrategy", "ParameterServerStrategy"
EVERY_STEPS = 16
# More samples than this make the order statistics no better, and slower.
_MOST_SAMPLES = 200
_MOST_SERVERS = 8


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One way of training on several workers.

    Attributes:
      strategy: name of the strategy.
      workers: number of workers.
      label: the policies in words, for tables.
      code: the policies as a user writes them.
      policies: builds the policies; they keep state, so each simulation needs new ones.
      servers: parameter servers; 0 without.
      spares: of `BackupWorkers`.
      codec: cost of the codec of `Compression`.
      is_exact: True if an update is what one device would compute from the global batch: no staleness, no codec.
    """

    strategy: str
    workers: int
    label: str
    code: str
    policies: Callable[[], list[Policy]]
    servers: int = 0
    spares: int = 0
    codec: CodecModel | None = None
    is_exact: bool = False


@dataclasses.dataclass(frozen=True)
class NamedCodec:
    """Stands for a codec of `tfdist.compression`, which needs TensorFlow: the simulator asks for its cost alone."""

    name: str
    label: str
    commutes_with_sum: bool
    unsent: tuple[str, ...] = ("residual",)

    def __repr__(self) -> str:
        return f"tfdist.compression.{self.name}"

    init = encode = decode = exchange = lambda self, *arguments: None


# Bytes sent / bytes, and speeds of one core in bytes of float32 (benchmarks/results/codecs.json). A threshold's ratio
# is that of a density of 0.25 %.
_HALF = (NamedCodec('HalfPrecision("bfloat16")', "bfloat16", True), CodecModel(0.5, 5e9, 5e9, True))
_THRESHOLD = (NamedCodec("Threshold()", "threshold", False), CodecModel(0.001, 4e9, 4e9, False))


def all_for(workers: int, samples: Sequence[float], has_dense: bool) -> Iterator[Candidate]:
    """Yields the candidates for a number of workers.

    Args:
      workers: number of workers, at least 2.
      samples: seconds of single steps, from which the spares follow.
      has_dense: whether there are dense gradients to compress.
    """
    spares = best_spares(workers, samples)
    backup = f"BackupWorkers(spares={spares})"
    yield Candidate(MULTI_WORKER, workers, "synchronous", "", list, is_exact=True)
    if spares:
        policies = _builder(BackupWorkers, spares=spares)
        yield Candidate(MULTI_WORKER, workers, _spares(spares), backup, policies, spares=spares, is_exact=True)
    averaging = f"ParameterAveraging(every_steps={EVERY_STEPS})"
    yield Candidate(
        MULTI_WORKER,
        workers,
        "averaging",
        averaging,
        _builder(ParameterAveraging, every_steps=EVERY_STEPS),
    )
    for codec, cost in (_HALF, _THRESHOLD) if has_dense else ():
        code = f"Compression({codec!r})"
        yield Candidate(MULTI_WORKER, workers, codec.label, code, _builder(Compression, codec), codec=cost)
    for servers in server_counts(workers):
        yield Candidate(PARAMETER_SERVER, workers, "asynchronous", "", list, servers=servers)
    servers = server_counts(workers)[-1]
    for count in sorted({0, spares}):
        yield Candidate(
            PARAMETER_SERVER,
            workers,
            _spares(count) if count else "synchronous",
            f"BackupWorkers(spares={count})",
            _builder(BackupWorkers, spares=count),
            servers=servers,
            spares=count,
            is_exact=True,
        )
    if has_dense:
        codec, cost = _HALF
        cost = dataclasses.replace(cost, variables_ratio=0.5)
        code = f"Compression({codec!r})"
        yield Candidate(PARAMETER_SERVER, workers, codec.label, code, _builder(Compression, codec), servers, codec=cost)


def server_counts(workers: int) -> list[int]:
    """Returns the numbers of parameter servers that are tried: one, and a quarter of the workers."""
    return sorted({1, min(_MOST_SERVERS, max(1, workers // 4))})


def _spares(count: int) -> str:
    return f"{count} spare{'s' * (count > 1)}"


def best_spares(workers: int, samples: Sequence[float]) -> int:
    """Returns the number of spares b that maximises (n - b) / E[X(n - b : n)], as `BackupWorkers(spares="auto")` does.

    0 unless that gains 5 %.
    """
    ordered = sorted(samples)
    if len(ordered) > _MOST_SAMPLES:
        ordered = [ordered[(2 * index + 1) * len(ordered) // (2 * _MOST_SAMPLES)] for index in range(_MOST_SAMPLES)]
    best, _ = backup_workers.best_spares([ordered] * workers, workers, workers // 2)
    return best


def _builder(kind: type[Policy], *arguments: object, **keywords: object) -> Callable[[], list[Policy]]:
    return lambda: [kind(*arguments, **keywords)]
