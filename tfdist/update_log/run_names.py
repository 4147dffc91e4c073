# SPDX-License-Identifier: Apache-2.0
"""Run directory of a job, from the directories of its logs."""

from __future__ import annotations

import re

from tfdist.update_log.timeline import Timeline

# The chief, or each worker, writes its log to a directory of its own below the run's.
_WRITER = re.compile(r"(^|/)(policy|workers/[^/]+)$")
_LOG = re.compile(r"(^|/)updates(_\d+)?$")


def run_directory(timeline: Timeline) -> str:
    """Returns the path of a job's run directory, below the log directory; "" for the log directory itself."""
    return _WRITER.sub("", _LOG.sub("", min(timeline.headers)))
