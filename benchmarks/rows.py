# SPDX-License-Identifier: Apache-2.0
"""Rows of the benchmark: contenders that are measured against each other. README.md has the same as a table."""

from __future__ import annotations

import dataclasses

import scenarios


@dataclasses.dataclass(frozen=True)
class Measurement:
    """A duel of the contenders of a stage.

    Attributes:
      row: what selects it.
      rivals: by name, the least ratio of tfdist's steps per second to the rival's that we want; None where it is shown
        for orientation. The rival "limit" is no process: it is what the policy could reach under these delays.
      scenario: the delays.
      sizes: the models that it is measured with.
      rounds, segment_secs: segments of each contender, and about how long tfdist's take.
      changed: contenders that another version (--against) is compared with besides tfdist.
    """

    row: str
    rivals: dict[str, float | None]
    scenario: scenarios.Scenario = scenarios.PLAIN
    sizes: tuple[str, ...] = ("tiny", "1M", "25M")
    rounds: int = 7
    segment_secs: float = 1.5
    changed: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Stage:
    """Contenders that live at the same time, and what is measured with them.

    Attributes:
      strategy: the first part of the contenders' names.
      contenders: the second part; tfdist's first. Two duels of the same processes spare us a start.
      num_workers, num_ps: processes of each contender's cluster, a chief aside; 0 for one process.
      num_replicas: who contributes to an update, for the limit.
      spares: backup workers among them, for the limit.
      multiple_of: of which number the steps of a segment are a multiple.
      starts: how often the contenders are started, each time for the rounds of each measurement. Of two processes that
        run the same program one is some hundredths faster than the other, for as long as they live: a row that is to
        tell so little apart needs several.
    """

    strategy: str
    contenders: tuple[str, ...]
    measurements: tuple[Measurement, ...]
    num_workers: int = 0
    num_ps: int = 0
    num_replicas: int = 0
    spares: int = 0
    multiple_of: int = 1
    starts: int = 1


# A step that takes at most 2 % longer.
_MIRRORED = Measurement("mirrored", {"stock": 1 / 1.02})
_MULTI_WORKER = Measurement("multi_worker", {"tf_keras": 1.0})
_PARAMETER_SERVER = Measurement(
    "parameter_server", {"bare": 0.95, "tf_keras": 2.0}, sizes=("tiny", "1M", "25M", "deep")
)
# Not in the table: PyTorch is an extra of its own, and MPI another.
_TORCH_BY_MPI = Measurement("torch", {"torch": 1.0})
_TORCH_BY_TENSORFLOW = Measurement("torch", {"torch": 0.6})
# On one machine, where no codec saves what it costs.
_COMPRESSION = Measurement("compression", {"tensorflow": 0.97})
# A gradient transform, which has the same cost as Keras' clipping at best.
_TRANSFORMS = Measurement("transforms", {"clipped": None}, sizes=("tiny",), segment_secs=1.0, changed=("clipped",))
# More workers than this machine has cores. "mpi spinning" waits as MPI libraries do by default.
_MORE_WORKERS = Measurement("more_workers", {"mpi spinning": None, "tensorflow": None, "torch": None}, rounds=5)
_BACKENDS = Measurement("backends", {"keras_torch": None, "keras_jax": None})


def _at_once(strategy: str, contender: str, rival: str, least: float | None, num_ps: int = 0) -> Stage:
    """Returns the stage in which 16 steps at once are measured against one."""
    measurement = Measurement("steps_per_execution", {rival: least}, sizes=("tiny",))
    return Stage(strategy, (contender, rival), (measurement,), 2, num_ps, multiple_of=16, starts=3)


def _heavy_tail(rival: str) -> tuple[Measurement, ...]:
    return tuple(
        Measurement("heavy_tail", {"limit": 0.9, rival: None}, scenario, ("tiny",), rounds=3, segment_secs=6.0)
        for scenario in (scenarios.LOGNORMAL, scenarios.PARETO)
    )


def _one_spare(rival: str) -> tuple[Measurement, ...]:
    return (
        Measurement("stalled", {rival: 8.0, "limit": None}, scenarios.STALLED, ("tiny",), rounds=3, segment_secs=4.0),
        Measurement("no_straggler", {rival: 0.97}, scenarios.EQUAL, ("tiny", "1M"), rounds=5),
        Measurement("no_straggler", {rival: 0.97}, scenarios.PLAIN, ("tiny", "1M")),
    )


STAGES = (
    Stage("mirrored", ("tfdist", "stock"), (_MIRRORED,), starts=5),
    Stage("multi_worker", ("tfdist", "tf_keras"), (_MULTI_WORKER,), num_workers=2),
    Stage("multi_worker", ("mpi", "torch"), (_TORCH_BY_MPI,), num_workers=2, starts=3),
    Stage("multi_worker", ("tensorflow", "torch"), (_TORCH_BY_TENSORFLOW,), num_workers=2, starts=3),
    Stage("multi_worker", ("mpi", "mpi spinning", "tensorflow", "torch"), (_MORE_WORKERS,), num_workers=4),
    Stage("one_device", ("tfdist", "keras_torch", "keras_jax"), (_BACKENDS,), starts=3),
    Stage("multi_worker", ("auto", "tensorflow"), (_COMPRESSION,), num_workers=2, starts=3),
    Stage("multi_worker", ("tfdist", "clipped"), (_TRANSFORMS,), num_workers=2, starts=2),
    Stage("parameter_server", ("tfdist", "clipped"), (_TRANSFORMS,), num_workers=3, num_ps=1, starts=2),
    # What Keras itself gains, of which a distributed step has a part.
    _at_once("multi_worker", "independent x16", "independent", None),
    _at_once("multi_worker", "mpi x16", "mpi", 3.0),
    _at_once("multi_worker", "tensorflow x16", "tensorflow", 1.5),
    _at_once("parameter_server", "x16", "tfdist", 4.0, num_ps=1),
    _at_once("parameter_server", "x16 accumulating", "tfdist", 3.0, num_ps=1),
    Stage("parameter_server", ("tfdist", "bare", "tf_keras"), (_PARAMETER_SERVER,), num_workers=3, num_ps=1, starts=3),
    Stage("parameter_server", ("spares=2", "spares=0"), _heavy_tail("spares=0"), 8, 1, num_replicas=8, spares=2),
    Stage("multi_worker", ("spares=2", "no policy"), _heavy_tail("no policy"), 8, num_replicas=8, spares=2),
    Stage("parameter_server", ("spares=1", "spares=0"), _one_spare("spares=0"), 4, 1, num_replicas=4, spares=1),
    Stage("multi_worker", ("spares=1", "no policy"), _one_spare("no policy"), 4, num_replicas=4, spares=1),
    Stage("mirrored", ("spares=1", "no policy"), _one_spare("no policy"), num_replicas=4, spares=1),
)
