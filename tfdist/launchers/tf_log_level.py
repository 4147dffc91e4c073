# SPDX-License-Identifier: Apache-2.0
"""The flag `--tf_log_level`: which of its own messages TensorFlow writes, through TF_CPP_MIN_LOG_LEVEL."""

from __future__ import annotations

from collections.abc import Mapping

from absl import flags

VARIABLE = "TF_CPP_MIN_LOG_LEVEL"
_LEVELS = {"info": "0", "warning": "1", "error": "2", "fatal": "3"}


def define_flag(values: flags.FlagValues) -> None:
    """Defines the flag. It takes names of levels, and TensorFlow's numbers for them."""
    text = f"least level of TensorFlow's own messages; by default {VARIABLE}, else warning"
    flags.DEFINE_enum("tf_log_level", None, [*_LEVELS, *_LEVELS.values()], text, flag_values=values)


def environment(chosen: str | None, env: Mapping[str, str], is_filtered: bool = False) -> dict[str, str]:
    """Returns the variables that the flag's value adds to the tasks' environment.

    Args:
      chosen: the flag's value.
      env: the launcher's environment, in which the user may have set a level.
      is_filtered: True if the launcher removes informational lines from the output anyway, and these tasks have lines
        that it keeps: those about GPUs, which TensorFlow writes at the same level.
    """
    if chosen is not None:
        return {VARIABLE: _LEVELS.get(chosen, chosen)}
    if env.get(VARIABLE):
        return {VARIABLE: env[VARIABLE]}
    return {} if is_filtered else {VARIABLE: _LEVELS["warning"]}
