# SPDX-License-Identifier: Apache-2.0
"""The update log: who contributed to each update of the variables, and when. NumPy only, no TensorFlow.

`LogWriter` writes the log of one task. `read_logs` merges the logs of all tasks below a directory into a `Timeline`;
`summary` adds up consecutive updates. docs/update_log.md describes the files.
"""

from tfdist.policies.records import Contribution, Outcome
from tfdist.telemetry.update_log.columns import Contributions, Events, Groups, Updates
from tfdist.telemetry.update_log.reader import LogReader, Reading, Skipped, read_logs
from tfdist.telemetry.update_log.records import EventKind, Header, UpdateRecord
from tfdist.telemetry.update_log.segments import Files, LocalFiles
from tfdist.telemetry.update_log.timeline import Timeline, run_directory
from tfdist.telemetry.update_log.writer import LogWriter

__all__ = [
    "Contribution",
    "Contributions",
    "EventKind",
    "Events",
    "Files",
    "Groups",
    "Header",
    "LocalFiles",
    "LogReader",
    "LogWriter",
    "Outcome",
    "Reading",
    "Skipped",
    "Timeline",
    "UpdateRecord",
    "Updates",
    "read_logs",
    "run_directory",
]
