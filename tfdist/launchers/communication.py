# SPDX-License-Identifier: Apache-2.0
"""The flag `--communication`: how scripts learn of it that leave the choice to the launcher."""

from __future__ import annotations

from absl import flags

AUTO, TENSORFLOW, MPI = KINDS = ("auto", "tensorflow", "mpi")
# Read by `MultiWorkerMirroredStrategy(communication="auto")`.
VARIABLE = "TFDIST_COMMUNICATION"


def define_flag(values: flags.FlagValues) -> None:
    """Defines the flag."""
    text = "what sums tensors of CPUs over the workers of MultiWorkerMirroredStrategy"
    flags.DEFINE_enum("communication", AUTO, list(KINDS), text, flag_values=values)


def environment(chosen: str) -> dict[str, str]:
    """Returns the variables that the flag's value adds to the tasks' environment."""
    return {} if chosen == AUTO else {VARIABLE: chosen}
