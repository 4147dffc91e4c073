# SPDX-License-Identifier: Apache-2.0
"""Filter for the informational lines that TensorFlow's C++ code writes at every start of a task. No TensorFlow import.

TF_CPP_MIN_LOG_LEVEL doesn't suppress all of these lines, because some are written before TensorFlow's logger is set up.
Warnings, errors and lines about present GPUs stay, and so does Python's own logging, whose lines have a date. All lines
are shown if TF_CPP_MIN_LOG_LEVEL is set, for example to 0. Log files of tasks have all lines in any case.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

from tfdist.launchers import gpus
from tfdist.launchers.requests import SENT_PREFIX

_LEVEL = "TF_CPP_MIN_LOG_LEVEL"
# A logger that is not set up writes the date 00/00.
_INFORMATION = re.compile(r"I0000 00:00:\d+\.\d+ +\d+ (?!gpu_|cuda_dnn)\S+\.(?:cc|h):\d+\] ")
_OF_INFORMATION = re.compile(r"To enable the following instructions: |/job:\w+/(?:replica:\d+/)?task:\d+$")
# The line before a printed protocol buffer, and the lines of the buffer; the last one may be empty.
_BUFFER_FOLLOWS = "goo.gle/debug"
_OF_BUFFER = re.compile(r"\s*(?:\w+ \{|\w+: .*|\})?$")
_NO_LOGGER = "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR"
# 303: this machine has no NVIDIA driver.
_NO_DRIVER = re.compile(r"E0000 00:00:\d+\.\d+ +\d+ cuda_platform\.cc:\d+\] failed call to cuInit: .*\(303\)")


class StartupNoise:
    """Filter for the lines of one stream; it also removes the continuation lines of a removed line.

    Args:
      env: the environment of the task; with TF_CPP_MIN_LOG_LEVEL in it, all lines stay.
    """

    def __init__(self, env: Mapping[str, str] | None = None) -> None:
        env = os.environ if env is None else env
        self._is_wanted, self._has_gpus = (
            bool(env.get(name) or env.get(SENT_PREFIX + name)) for name in (_LEVEL, gpus.VISIBLE)
        )
        self._was_information = False
        self._is_in_buffer = False

    def without(self, lines: Sequence[str]) -> list[str]:
        """Returns the next lines without startup noise."""
        return [line for line in lines if self._is_wanted or not self._is_noise(line)]

    def _is_noise(self, line: str) -> bool:
        is_first = bool(_INFORMATION.match(line))
        self._is_in_buffer = (
            _BUFFER_FOLLOWS in line if is_first else self._is_in_buffer and bool(_OF_BUFFER.match(line))
        )
        belongs = self._was_information and bool(_OF_INFORMATION.match(line))
        self._was_information = is_first or belongs or self._is_in_buffer
        is_expected = not self._has_gpus and bool(_NO_DRIVER.match(line))
        return self._was_information or line == _NO_LOGGER or is_expected
