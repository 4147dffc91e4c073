# SPDX-License-Identifier: Apache-2.0
"""A task that stands still doesn't stop its chief: neither the report, nor any other thread."""

from __future__ import annotations

import pathlib

import programs
import pytest

SCRIPT = """
import threading, time
strategy = tfdist.ParameterServerStrategy(num_workers=2, num_ps=1)
before = strategy.report()
pid = strategy.distribution.serving.embedded.pid("worker:1")
ticks, ended = [], threading.Event()
def tick():
    while not ended.wait(0.05):
        ticks.append(time.monotonic())
threading.Thread(target=tick, daemon=True).start()
os.kill(pid, signal.SIGSTOP)
try:
    first = len(ticks)
    report = strategy.report()
    during = len(ticks) - first
finally:
    os.kill(pid, signal.SIGCONT)
    ended.set()
# The report has waited for the answer in a thread of its own, and the others have gone on.
assert during >= 10, during
assert report.bytes_sent["worker:1"] == before.bytes_sent["worker:1"] > 0
print("the chief went on", flush=True)
"""


@pytest.mark.processes
def test_a_stopped_worker_stops_no_report_and_no_thread(tmp_path: pathlib.Path) -> None:
    with programs.running(SCRIPT, tmp_path) as program:
        assert program.wait(100) == 0, program.output
