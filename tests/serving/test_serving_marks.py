# SPDX-License-Identifier: Apache-2.0
"""The folder in which the chief says that it is done: nobody else can guess it, and nobody else's is used."""

from __future__ import annotations

import os
import pathlib
import signal
import stat
import subprocess
import sys
import textwrap

import pytest

from tfdist import Cluster, Task, _log
from tfdist.cluster import JOB_SECRET_VARIABLE
from tfdist.serving import task as serving_task

CLUSTER = Cluster({"chief": {0: "a:1"}, "worker": {0: "b:1"}, "ps": {0: "c:1"}}, Task("worker", 0))


@pytest.fixture(autouse=True)
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """In place of /tmp, and without a secret."""
    monkeypatch.delenv(JOB_SECRET_VARIABLE, raising=False)
    monkeypatch.setattr(serving_task, "_MARKS", tmp_path)
    return serving_task.done_mark(CLUSTER, CLUSTER.task).parent


def test_the_secret_of_the_job_is_in_the_name(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {folder.name}
    for secret in ("one", "two"):
        monkeypatch.setenv(JOB_SECRET_VARIABLE, secret)
        names |= {serving_task.done_mark(CLUSTER, task).parent.name for task in CLUSTER.tasks}
        assert not any(secret in name for name in names)
    assert len(names) == 1 + 2 * 3
    chief = CLUSTER.with_task(Task("chief", 0))
    assert serving_task.done_mark(chief, CLUSTER.task) == serving_task.done_mark(CLUSTER, CLUSTER.task)


def test_a_name_that_can_be_guessed_is_kept_from_others(folder: pathlib.Path) -> None:
    (folder / "of" / "an earlier attempt").mkdir(parents=True)
    serving_task.prepare(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert list(folder.iterdir()) == []


def test_a_name_that_can_not_be_guessed_leaves_no_folder(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(JOB_SECRET_VARIABLE, "one")
    folder = serving_task.done_mark(CLUSTER, CLUSTER.task).parent
    folder.mkdir()
    (folder / "done").write_text("by the chief of an earlier attempt")
    serving_task.prepare(folder)
    assert not folder.exists()


def a_link(folder: pathlib.Path) -> None:
    (folder.parent / "elsewhere").mkdir()
    folder.symlink_to(folder.parent / "elsewhere")


def a_link_to_nothing(folder: pathlib.Path) -> None:
    folder.symlink_to(folder.parent / "nowhere")


def a_file(folder: pathlib.Path) -> None:
    folder.write_text("mine")


def of_another_user(folder: pathlib.Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder to another user")
    folder.mkdir()
    os.chown(folder, 12345, 12345)


@pytest.mark.parametrize("make", [a_link, a_link_to_nothing, a_file, of_another_user])
def test_what_another_user_may_have_made_is_refused(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch, make
) -> None:
    make(folder)
    said: list[str] = []
    monkeypatch.setattr(_log, "say", said.append)
    monkeypatch.setattr(serving_task._machine, "keep_freed_memory", lambda few_arenas: True)
    assert serving_task.serve(CLUSTER) == 1
    (line,) = said
    assert line.startswith(f"worker:0: {folder} is not a folder of this user")
    assert JOB_SECRET_VARIABLE in line
    assert "\n" not in line
    assert folder.is_symlink() or folder.exists()


def test_a_mark_in_a_folder_of_another_user_does_not_count(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.mkdir()
    assert serving_task.is_ours(folder)
    monkeypatch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)
    assert not serving_task.is_ours(folder)


def test_ctrl_c_ends_a_server_by_sigint_without_a_traceback() -> None:
    script = """
        import atexit, os, signal, sys
        from tfdist.serving import task

        task._machine.keep_freed_memory = lambda few_arenas: os.kill(os.getpid(), signal.SIGINT)
        atexit.register(print, "ended in order")
        sys.exit(task.serve(None))
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "ended in order\n", "")
