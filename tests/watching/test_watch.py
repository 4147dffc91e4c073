# SPDX-License-Identifier: Apache-2.0
"""`tfdist watch` as a command: without a terminal, in one, without a log, and with several runs."""

from __future__ import annotations

import io
import os
import pathlib
import pty
import re
import select
import signal
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Sequence

import cluster_log
import pytest
from rich.console import Console

from tfdist import cli
from tfdist.policies import Contribution
from tfdist.telemetry.update_log import EventKind, Header, LogWriter, Timeline, UpdateRecord, read_logs
from tfdist.watching.watch import Watched

ENTERS, LEAVES, SHOWS_CURSOR = "\x1b[?1049h", "\x1b[?1049l", "\x1b[?25h"


def watch(*arguments: str) -> int:
    return cli.main(["watch", *arguments])


def test_without_a_terminal_the_state_is_printed_once(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]):
    cluster_log.write(tmp_path / "old" / "updates", 2, 20, job="old", origin_secs=1e9)
    cluster_log.write(tmp_path / "new" / "policy" / "updates", 3, 30, job="new", origin_secs=2e9)
    assert watch(str(tmp_path)) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert out.startswith("new  ParameterServerStrategy  BackupWorkers(spares=1)  (+1 other run: --run)\n")
    assert "step 30, " in out
    assert sum(line.startswith("worker:") for line in out.splitlines()) == 3
    assert watch("--run=old", "--once", str(tmp_path)) == 0
    assert capsys.readouterr().out.startswith("old  ")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--once", "nothing"], 2, "there is no update log below 'nothing'; name the log_dir of tfdist.callbacks."),
        (["file"], 2, "tfdist watch takes a log directory, and this is a file. Received: 'file'"),
        ([], 2, "give one LOGDIR. Received: nothing (see tfdist watch --help)"),
        (["a", "b"], 2, "give one LOGDIR. Received: a b (see tfdist watch --help)"),
        (["--refresh_secs=0", "."], 2, "--refresh_secs must be a number in the range [0.1, "),
    ],
)
def test_wrong_arguments_are_one_line(tmp_path, monkeypatch, capsys, arguments, code, words):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("file").write_text("")
    assert watch(*arguments) == code
    line = capsys.readouterr().err
    assert line.startswith(f"tfdist: {words}") and line.count("\n") == 1


def test_a_missing_run_names_those_that_exist(tmp_path, capsys):
    cluster_log.write(tmp_path / "one" / "updates", 2, 5)
    assert watch("--once", "--run=two", str(tmp_path)) == 2
    assert f"no update log of the run 'two' below {str(tmp_path)!r}; there are: one" in capsys.readouterr().err


# The screen.


def drawn(job: Timeline | str | pathlib.Path, height: int | None = None, width: int = 80) -> list[str]:
    if isinstance(job, Timeline):
        watched = Watched("logs", None, 60.0)
        watched.job = job
    else:
        watched = Watched(str(job), None, 60.0)
        watched.read()
    console = Console(file=io.StringIO(), width=width, highlight=False, markup=False, color_system=None)
    console.print(watched.draw(height))
    return console.file.getvalue().splitlines()


def rows(lines: list[str]) -> dict[str, list[str]]:
    heading = next(index for index, line in enumerate(lines) if line.startswith("worker "))
    cells = [line.split() for line in lines[heading:] if line.startswith("worker:")]
    return {first: rest for first, *rest in cells}


@pytest.mark.parametrize(("width", "height"), [(80, 24), (160, 50), (80, 12), (200, 100)])
def test_the_screen_fits_and_counts_hidden_workers(tmp_path: pathlib.Path, width: int, height: int):
    cluster_log.write(tmp_path / "updates", workers=64, updates=200, spares=4, slow=(1.6, 3.0))
    lines = drawn(tmp_path, height, width)
    assert len(lines) <= height and max(map(len, lines)) <= width
    shown = list(rows(lines))
    # The lost worker, then the slow ones: most of their gradients are dropped.
    assert shown[: min(3, len(shown))] == ["worker:1", "worker:63", "worker:62"][: len(shown)]
    assert rows(lines)["worker:1"][0] == "lost"
    assert len(shown) == 64 or any(line.startswith(f"{64 - len(shown)} more workers") for line in lines)
    assert len(rows(drawn(tmp_path, None, width))) == 64


def test_rates_and_counts_are_those_of_the_log(tmp_path: pathlib.Path):
    cluster_log.write(tmp_path / "updates", workers=3, updates=100, slow=4.0)
    timeline = read_logs(tmp_path)
    begin, end = timeline.span
    lines = drawn(tmp_path)
    assert f"step 100, {100 / (end - begin):.3g} updates/s" in " ".join(lines)
    for worker, name in enumerate(timeline.workers):
        mine = timeline.contributions[timeline.contributions.worker == worker]
        accepted, dropped = (int((mine.outcome == each).sum()) for each in (0, 1))
        rate = f"{(accepted + dropped) / (end - begin):.3g}"
        state = ["lost"] if worker == 1 else []
        assert rows(lines)[name][: len(state) + 3] == [*state, rate, str(accepted), str(dropped)]


def timeline(events: Sequence[tuple[float, int, EventKind, str]] = (), silent: int = 0) -> Timeline:
    """Two workers that make an update each second, of which the second one is silent for some seconds at the end."""
    names, count = ("worker:0", "worker:1", "worker:2"), 20
    header = Header("job", "chief:0", names, "S", ("P()",), time.time() - count - 5)
    with tempfile.TemporaryDirectory() as directory:
        writer = LogWriter(f"{directory}/updates", header, flush_secs=3600.0)
        for step in range(1, count + 1):
            there = (0, 1) if step <= count - silent else (0,)
            gradients = [Contribution(worker, step - 0.5, step) for worker in there]
            writer.add(UpdateRecord(step, step, 1.0, 0.5, 8, 0, gradients))
        for when, worker, kind, text in events:
            writer.event(kind, text, worker, when)
        writer.close()
        return read_logs(directory)


def test_states_say_who_is_lost_late_or_absent():
    assert rows(drawn(timeline()))["worker:2"][0] == "absent"
    found = rows(drawn(timeline(silent=8)))
    assert found["worker:1"][:3] == ["late", "8.0", "s"] and found["worker:0"][0] == "1"
    events = [
        (15.0, 1, EventKind.LOST, "gone"),
        (30.0, 0, EventKind.LOST, "gone"),
        (31.0, 0, EventKind.RETURNED, "back"),
    ]
    lines = drawn(timeline(events, silent=8))
    assert rows(lines)["worker:1"][0] == "lost" and next(iter(rows(lines))) == "worker:1"
    assert rows(lines)["worker:0"][0] == "1"
    assert lines[-1].endswith(" worker:0 back")


def test_an_ended_training_is_no_stalled_one():
    assert re.search(r"last update 5\.\d s ago", " ".join(drawn(timeline(silent=8))))
    lines = drawn(timeline([(20.0, -1, EventKind.FINISHED, "finished")], silent=8))
    assert re.search(r"finished 5\.\d s ago", " ".join(lines))
    assert rows(lines)["worker:1"][0] != "late"


def test_text_of_a_log_can_not_write_escape_sequences():
    text = "\n".join(drawn(timeline([(1.0, -1, EventKind.POLICY_CHANGED, "a\x1b[2Jb [red]c\n")])))
    assert "\x1b" not in text
    assert "a\N{REPLACEMENT CHARACTER}[2Jb [red]c\N{REPLACEMENT CHARACTER}" in text


class Terminal:
    """A `tfdist watch` in a terminal of 80 x 24."""

    def __init__(self, *arguments: str) -> None:
        self._keyboard, terminal = pty.openpty()
        termios.tcsetwinsize(terminal, (24, 80))
        self.before = termios.tcgetattr(terminal)
        self._terminal = terminal
        own = (
            "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
        )
        command = [sys.executable, "-c", own, sys.executable, "-m", "tfdist", "watch", *arguments]
        env = {**os.environ, "TERM": "xterm-256color"}
        env.pop("NO_COLOR", None)
        self.process = subprocess.Popen(
            command, stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True, env=env
        )
        self.text = ""

    def read_until(self, words: str, timeout_secs: float = 60.0) -> str:
        deadline = time.monotonic() + timeout_secs
        while words not in self.text:
            assert select.select([self._keyboard], [], [], max(0.0, deadline - time.monotonic()))[0], self.text
            self.text += os.read(self._keyboard, 1 << 16).decode("utf-8", "replace")
        return self.text

    def type(self, keys: bytes) -> None:
        os.write(self._keyboard, keys)

    def settings(self) -> list:
        return termios.tcgetattr(self._terminal)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._keyboard)
        os.close(self._terminal)


@pytest.mark.processes
@pytest.mark.timeout(120)
@pytest.mark.parametrize(("ending", "code"), [("ctrl-c", 130), (signal.SIGTERM, 143)])
def test_a_terminal_waits_follows_new_runs_and_is_restored(tmp_path: pathlib.Path, ending, code: int):
    terminal = Terminal(str(tmp_path / "logs"), "--refresh_secs=0.1")
    try:
        terminal.read_until("waiting for an update log below")
        cluster_log.write(tmp_path / "logs" / "first" / "updates", 2, 10, job="a", origin_secs=1e9)
        terminal.read_until("first")
        cluster_log.write(tmp_path / "logs" / "second" / "updates", 2, 12, job="b", origin_secs=2e9)
        assert ENTERS in terminal.read_until("step 12")
        if ending == "ctrl-c":
            terminal.type(b"\x03")
        else:
            terminal.process.send_signal(ending)
        terminal.read_until(LEAVES)
        assert terminal.process.wait(60) == code
        assert SHOWS_CURSOR in terminal.text
        assert terminal.settings() == terminal.before
        assert "Traceback" not in terminal.text
    finally:
        terminal.close()
