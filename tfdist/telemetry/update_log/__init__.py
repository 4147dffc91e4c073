# SPDX-License-Identifier: Apache-2.0
"""The update log: who contributed to each update of the variables, and when. NumPy only, no TensorFlow.

`LogWriter` writes the log of one task. `read_logs` joins the logs of a job below a directory into a `Timeline`.
docs/update_log.md describes the files.
"""

from tfdist.policies.records import Contribution, Outcome
from tfdist.telemetry.update_log.columns import (
    Contributions,
    EventKind,
    Events,
    Groups,
    Header,
    Scalars,
    UpdateRecord,
    Updates,
)
from tfdist.telemetry.update_log.reader import LogReader, Reading, Skipped, Timeline, read_logs, run_directory
from tfdist.telemetry.update_log.writer import LogWriter

__all__ = [
    "Contribution",
    "Contributions",
    "EventKind",
    "Events",
    "Groups",
    "Header",
    "LogReader",
    "LogWriter",
    "Outcome",
    "Reading",
    "Scalars",
    "Skipped",
    "Timeline",
    "UpdateRecord",
    "Updates",
    "read_logs",
    "run_directory",
]
