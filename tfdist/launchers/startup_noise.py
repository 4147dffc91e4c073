# SPDX-License-Identifier: Apache-2.0
"""Leaves out what TensorFlow's C++ code says at every start, once for each task. No TensorFlow import.

TF_CPP_MIN_LOG_LEVEL does not reach all of these lines: they are written before TensorFlow's logger is set up. Warnings
and errors stay, and so does Python's own logging, whose lines carry a date. A user who sets TF_CPP_MIN_LOG_LEVEL, to 0
for instance, sees everything; log files of tasks have it in any case. What is said of GPUs that are there stays.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

from tfdist.launchers import gpus
from tfdist.launchers.requests import SENT_PREFIX

_LEVEL = "TF_CPP_MIN_LOG_LEVEL"
# The date 00/00 is that of a logger that is not set up.
_INFORMATION = re.compile(r"I0000 00:00:\d+\.\d+ +\d+ (?!gpu_|cuda_dnn)\S+\.(?:cc|h):\d+\] ")
_OF_INFORMATION = re.compile(r"To enable the following instructions: |/job:\w+/(?:replica:\d+/)?task:\d+$")
# What TensorFlow puts before a printed protocol buffer, and its lines; the last one may be empty.
_BUFFER_FOLLOWS = "goo.gle/debug"
_OF_BUFFER = re.compile(r"\s*(?:\w+ \{|\w+: .*|\})?$")
_NO_LOGGER = "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR"
# 303: this machine has no NVIDIA driver.
_NO_DRIVER = re.compile(r"E0000 00:00:\d+\.\d+ +\d+ cuda_platform\.cc:\d+\] failed call to cuInit: .*\(303\)")


class StartupNoise:
    """Removes such lines from one stream; a line that belongs to the one before it goes with it.

    Args:
      env: the environment of the task; with TF_CPP_MIN_LOG_LEVEL in it, every line stays.
    """

    def __init__(self, env: Mapping[str, str] | None = None) -> None:
        env = os.environ if env is None else env
        self._is_wanted, self._has_gpus = (
            bool(env.get(name) or env.get(SENT_PREFIX + name)) for name in (_LEVEL, gpus.VISIBLE)
        )
        self._was_information = False
        self._is_in_buffer = False

    def without(self, lines: Sequence[str]) -> list[str]:
        """Those of the next lines that are shown."""
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
