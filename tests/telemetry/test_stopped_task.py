# SPDX-License-Identifier: Apache-2.0
"""A task that stands still doesn't stop its chief: neither the report, nor a checkpoint, nor any other thread."""

from __future__ import annotations

import pathlib

import programs
import pytest

SCRIPT = """
import threading, time
strategy = tfdist.ParameterServerStrategy(
    num_workers=2, num_ps=1, transforms=[tfdist.transforms.momentum_correction()], stall_timeout_secs=60.0
)
made = model(strategy)
made.fit(X, Y, verbose=0)
transforms = strategy.distribution.transforms
assert transforms.collect(made)[1]
transforms.memory._timeout_secs = 5.0
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
    try:
        transforms.collect(made)
    except TimeoutError as error:
        message = str(error)
    during_collect = len(ticks) - first - during
finally:
    os.kill(pid, signal.SIGCONT)
    ended.set()
# The report has waited for the answer in a thread of its own, and the others have gone on.
assert during >= 10, during
assert during_collect >= 10, during_collect
assert message.startswith("worker:1 has not answered for 5 s"), message
assert report.bytes_sent["worker:1"] == before.bytes_sent["worker:1"] > 0
print("the chief went on", flush=True)
"""


@pytest.mark.processes
def test_a_stopped_worker_stops_no_report_checkpoint_or_thread(tmp_path: pathlib.Path) -> None:
    with programs.running(SCRIPT, tmp_path) as program:
        assert program.wait(100) == 0, program.output
