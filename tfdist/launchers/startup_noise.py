# SPDX-License-Identifier: Apache-2.0
"""Filter for the informational lines that TensorFlow's C++ code writes, mostly at a task's start. No TensorFlow import.

TF_CPP_MIN_LOG_LEVEL doesn't suppress all of these lines, because some are written before TensorFlow's logger is set up.
Warnings, errors and lines about present GPUs stay, and so does Python's own logging, whose lines have a date. All lines
are shown if TF_CPP_MIN_LOG_LEVEL is 0. Log files of tasks have all lines that a task writes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

from tfdist.launchers import gpus, tf_log_level
from tfdist.launchers.requests import SENT_PREFIX

# A logger that is not set up writes the date 00/00.
_INFORMATION = re.compile(r"I0000 00:00:\d+\.\d+ +\d+ (?!gpu_|cuda_dnn)\S+\.(?:cc|h):\d+\] ")
_OF_INFORMATION = re.compile(r"To enable the following instructions: |/job:\w+/(?:replica:\d+/)?task:\d+$")
# The line before a printed protocol buffer, and the lines of the buffer; the last one may be empty.
_BUFFER_FOLLOWS = "goo.gle/debug"
_OF_BUFFER = re.compile(r"\s*(?:\w+ \{|\w+: .*|\})?$")
_NO_LOGGER = "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR"
# Messages of the ordinary course of a parameter-server job: the rendezvous of a step is cleaned up, a handle of a
# tensor is deleted that the worker has deleted already, and functions can't be registered on, or removed from, a lost
# task. The launcher reports the loss. The error of a task can't be reported to one that has ended. When a task fails,
# all others abort their sums, and each says so up to four times before it raises the same.
_HARMLESS = re.compile(
    r"[WE]0000 00:00:\d+\.\d+ +\d+ "
    r"(?:local_rendezvous\.cc:\d+\] Local rendezvous is aborting with status: "
    r"(?:ABORTED: Cleanup |.*Collective ops is aborted)"
    r"|base_collective_executor\.cc:\d+\] BaseCollectiveExecutor::StartAbort "
    r"|\w+\.cc:\d+\] Aborting (?:Ring|Hier)\w* with "
    r"|preemption_notifier\.cc:\d+\] SIGTERM caught"
    r"|coordination_service(?:_agent)?\.cc:\d+\] Encountered another error (?:while|when) reporting "
    r"|destroy_tensor_handle_node\.h:\d+\] Ignoring an error encountered when deleting remote tensors handles: "
    r"|context\.cc:\d+\] Failed to (?:register|remove) function remotely due to "
    r"(?:failed to connect to all addresses|Socket closed|Connection reset|Broken pipe|recvmsg:|sendmsg:))"
)
_OF_HARMLESS = re.compile(
    r"Additional GRPC error information from remote target |:[A-Z_]+:Error received from peer "
    r"|This could happen if the remote target has been disconnected from the client\.$"
    r"|The error could be from a previous operation\. Restart your program to reset\.$|\t \[\[\{\{"
)
# 303: this machine has no NVIDIA driver.
_NO_DRIVER = re.compile(r"E0000 00:00:\d+\.\d+ +\d+ cuda_platform\.cc:\d+\] failed call to cuInit: .*\(303\)")


class StartupNoise:
    """Filter for the lines of one stream; it also removes the continuation lines of a removed line.

    Args:
      env: the environment of the task; with TF_CPP_MIN_LOG_LEVEL=0 in it, all lines stay.
    """

    def __init__(self, env: Mapping[str, str] | None = None) -> None:
        env = os.environ if env is None else env
        level, visible = (
            env.get(name) or env.get(SENT_PREFIX + name) or "" for name in (tf_log_level.VARIABLE, gpus.VISIBLE)
        )
        # TensorFlow takes what is no number as 0.
        self._is_wanted = bool(level) and level not in ("1", "2", "3")
        self._has_gpus = bool(visible)
        self._was_information = False
        self._was_harmless = False
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
        is_harmless = bool(_HARMLESS.match(line))
        self._was_harmless = is_harmless or (self._was_harmless and bool(_OF_HARMLESS.match(line)))
        is_expected = not self._has_gpus and bool(_NO_DRIVER.match(line))
        return self._was_information or self._was_harmless or line == _NO_LOGGER or is_expected
