# SPDX-License-Identifier: Apache-2.0
"""`tfdist watch` as a command: without a terminal, in one, without a log, and with several runs."""

from __future__ import annotations

import os
import pathlib
import pty
import select
import signal
import subprocess
import sys
import termios
import time

import logs
import pytest

from tfdist import cli

ENTERS, LEAVES, SHOWS_CURSOR = "\x1b[?1049h", "\x1b[?1049l", "\x1b[?25h"


def watch(*arguments: str) -> int:
    return cli.main(["watch", *arguments])


def test_without_a_terminal_the_state_is_printed_once(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]):
    logs.write_synchronous(tmp_path / "old", 2, 20, job="old", origin_secs=1e9)
    logs.write_synchronous(tmp_path / "new", 3, 30, job="new", origin_secs=2e9)
    assert watch(str(tmp_path)) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert out.startswith("new  MultiWorkerMirroredStrategy  (+1 other run: --run)\n")
    assert "step 30  updates 30" in out
    assert sum(line.startswith("worker:") for line in out.splitlines()) == 3
    assert watch("--run=old", "--once", str(tmp_path)) == 0
    assert capsys.readouterr().out.startswith("old  ")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--once", "nothing"], 1, "there is no update log below 'nothing'"),
        (["--once", "."], 1, "there is no update log below '.'"),
        (["file"], 2, "tfdist watch takes a log directory, and this is a file. Received: 'file'"),
        ([], 2, "tfdist watch takes one log directory; see tfdist watch --help. Received: no directory"),
        (["a", "b"], 2, "tfdist watch takes one log directory; see tfdist watch --help. Received: a b"),
        (["--refresh_secs=0", "."], 2, "--refresh_secs must be a number in the range [0.1, "),
        (["--colour", "."], 2, "unknown flag --colour"),
    ],
)
def test_wrong_arguments_are_one_line(tmp_path, monkeypatch, capsys, arguments, code, words):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("file").write_text("")
    assert watch(*arguments) == code
    line = capsys.readouterr().err
    assert line.startswith(f"tfdist: {words}") and line.count("\n") == 1


def test_a_missing_run_names_those_that_exist(tmp_path, capsys):
    logs.write_synchronous(tmp_path / "one", 2, 5)
    assert watch("--once", "--run=two", str(tmp_path)) == 1
    assert f"no update log of the run 'two' below {str(tmp_path)!r}; there are: one" in capsys.readouterr().err


def test_without_rich_one_line_says_how_to_install_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert watch(str(tmp_path)) == 1
    assert "the library rich, which is missing; pip install rich" in capsys.readouterr().err


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
        logs.write_synchronous(tmp_path / "logs" / "first", 2, 10, job="a", origin_secs=1e9)
        terminal.read_until("first")
        logs.write_synchronous(tmp_path / "logs" / "second", 2, 12, job="b", origin_secs=2e9)
        assert ENTERS in terminal.read_until("updates 12")
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
