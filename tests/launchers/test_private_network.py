# SPDX-License-Identifier: Apache-2.0
"""A job in a network of its own: its tasks reach each other, and nobody else reaches them."""

from __future__ import annotations

import errno
import os
import pathlib
import socket
import subprocess
import sys

import pytest

from tfdist import cli
from tfdist.launchers import local
from tfdist.launchers.requests import LaunchError

ROOT = pathlib.Path(__file__).resolve().parents[2]
_TRY = ["-c", "from tfdist.launchers import local; local.enter_private_network()"]
# Listens as TensorFlow's server does: on all interfaces, at the port of its task.
_SERVES = """
import json, os, socket, sys
config = json.loads(os.environ["TF_CONFIG"])
addresses, index = config["cluster"]["worker"], config["task"]["index"]
port = int(addresses[index].rpartition(":")[2])
server = socket.create_server(("", port))
print("interfaces", *(name for _, name in socket.if_nameindex()), flush=True)
if index == 0:
    print("port", port, flush=True)
    server.accept()[0].close()
    server.accept()
else:
    while socket.socket().connect_ex(("127.0.0.1", int(addresses[0].rpartition(":")[2]))):
        pass
    print("reached", flush=True)
"""


@pytest.fixture(scope="module")
def may_enter() -> None:
    if subprocess.run([sys.executable, *_TRY], cwd=ROOT, capture_output=True, timeout=60).returncode:
        pytest.skip("this system lets this user make no network namespace")


@pytest.mark.processes
@pytest.mark.usefixtures("may_enter")
@pytest.mark.parametrize("flags", [(), ("--private_network",)], ids=["shared", "private"])
def test_a_stranger_reaches_only_a_job_without_private_network(flags: tuple[str, ...], tmp_path: pathlib.Path):
    (tmp_path / "serve.py").write_text(_SERVES)
    command = [sys.executable, "-m", "tfdist", "launch", "local", *flags, str(tmp_path / "serve.py")]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as launcher:
        try:
            lines = _lines_until(launcher, "port", "reached")
            port = int(next(line for line in lines if "port" in line).split()[-1])
            with socket.socket() as stranger:
                stranger.settimeout(30)
                refused = stranger.connect_ex(("127.0.0.1", port)) == errno.ECONNREFUSED
        finally:
            launcher.terminate()
            launcher.communicate(timeout=60)
    assert refused == bool(flags), lines
    names = {tuple(line.split()[2:]) for line in lines if "interfaces" in line}
    assert names == {("lo",)} or not flags


def _lines_until(launcher: subprocess.Popen[str], *wanted: str) -> list[str]:
    assert launcher.stdout is not None
    lines = []
    for line in launcher.stdout:
        lines.append(line)
        if all(any(word in each for each in lines) for word in wanted):
            return lines
    raise AssertionError(lines)


@pytest.mark.processes
@pytest.mark.usefixtures("may_enter")
def test_the_user_and_the_files_stay_the_same(tmp_path: pathlib.Path):
    code = _TRY[1] + "; import os, pathlib; pathlib.Path('mark').touch(); print(os.getuid(), os.getgid())"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == [str(os.getuid()), str(os.getgid())], done.stderr
    assert (tmp_path / "mark").stat().st_uid == os.getuid()


_AS_ANOTHER = """
import ctypes, os, socket
from tfdist.launchers import local
os.setgroups([]), os.setgid(65534), os.setuid(65534)
ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE, as in a process that this user has started
local.enter_private_network()
server = socket.create_server(("127.0.0.1", 0))
socket.socket().connect(server.getsockname())
print(*os.getresuid(), *(name for _, name in socket.if_nameindex()), flush=True)
os.execv("/bin/sh", ["sh", "-c", "id -u; grep CapEff /proc/self/status"])
"""


@pytest.mark.processes
@pytest.mark.usefixtures("may_enter")
@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
def test_a_user_without_rights_has_none_inside_either():
    done = subprocess.run([sys.executable, "-c", _AS_ANOTHER], cwd=ROOT, capture_output=True, text=True, timeout=60)
    if "make no network namespace" in done.stderr:
        pytest.skip("this system lets plain users make no network namespace")
    assert done.stdout.split() == ["65534"] * 3 + ["lo", "65534", "CapEff:", "0" * 16], done.stderr


@pytest.mark.parametrize("codes", [[errno.EPERM, errno.EPERM], [errno.ENOSPC], [errno.EPERM, errno.EINVAL]])
def test_a_system_that_refuses_is_one_line(codes: list[int], monkeypatch: pytest.MonkeyPatch):
    answers = iter(codes)
    monkeypatch.setattr(local, "_unshare", lambda flags: next(answers))
    with pytest.raises(LaunchError, match=r"make no network namespace .*leave out --private_network") as error:
        local.enter_private_network()
    assert "\n" not in str(error.value)
    assert next(answers, None) is None


def test_where_there_are_no_namespaces_it_is_one_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(LaunchError, match="this is darwin"):
        local.enter_private_network()


def test_a_dry_run_makes_no_network(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(local, "_unshare", lambda flags: pytest.fail("it did"))
    assert cli.main(["launch", "local", "--private_network", "--dry_run", "-m", "tfdist.doctor"]) == 0
    assert "worker:1" in capsys.readouterr().out
