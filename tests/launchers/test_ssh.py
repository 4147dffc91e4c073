# SPDX-License-Identifier: Apache-2.0
"""The ssh launcher: what it plans, what it checks before, and that nothing outlives it on the other side.

Most tests use an `ssh` that refuses unknown options and runs commands here; one uses a real server, where there is one.
"""

import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

import launching
import psutil
import pytest

from tfdist.launchers import requests
from tfdist.launchers.shape import Shape
from tfdist.launchers.ssh import launcher as ssh
from tfdist.launchers.ssh.launcher import Host
from tfdist.launchers.supervise.processes import PortReservation

FAKE = """#!{python} -S
import os, sys, time
words = sys.argv[1:]
while words[0].startswith("-") and words[0] != "--":
    option = words.pop(0)
    if not option.startswith(("-T", "-p", "-oBatchMode=", "-oConnectTimeout=", "-oControlPath=", "-oServerAlive")):
        sys.exit(f"unknown option -- {{option}}")
host, command = words[1:]
if host == "silent":
    time.sleep(1000)
away = os.path.join(os.environ["HOME"], "away")  # Names a host, and how often it can't be reached from now on.
name, times = open(away).read().split() if os.path.exists(away) else ("", 0)
if name == host and int(times):
    new = f"{{away}}.{{os.getpid()}}"
    with open(new, "w") as file:
        file.write(f"{{name}} {{int(times) - 1}}")
    os.replace(new, away)  # Others read it meanwhile.
if host not in ("alpha", "me@beta") or (name == host and int(times)):
    sys.stderr.write(f"ssh: Could not resolve hostname {{host}}: Name or service not known\\n")
    sys.exit(255)
# As sshd does: a fresh environment, the home directory, and the login shell.
env = {{"HOME": os.environ["HOME"], "PATH": os.defpath, "FAKE_HOST": host}}
if os.environ.get("FAKE_CLOCK"):
    env["PYTHONPATH"] = os.environ["FAKE_CLOCK"]
os.chdir(os.environ["HOME"])
os.execve("/bin/sh", ["sh", "-c", command], env)
"""


def hold(port):
    """Keeps a port from others who ask for any; a task that is told it can listen on it."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        held.bind(("", port))
    except OSError:
        held.close()
        raise
    return held


@pytest.fixture
def port():
    """A port that is free with those that follow it, for as many tasks as one host gets here."""
    for _ in range(100):
        with contextlib.ExitStack() as stack:
            port = stack.enter_context(PortReservation(1)).ports[0]
            with contextlib.suppress(OSError, OverflowError):
                for following in range(port + 1, port + 8):
                    stack.enter_context(hold(following))
                yield port
                return
    raise AssertionError("no 8 ports in a row are free")


@pytest.fixture
def launch(tmp_path, port):
    """Runs `tfdist launch ssh` with the stand-in for ssh; gives the code and both streams, or the process."""
    (tmp_path / "bin").mkdir()
    tool = tmp_path / "bin" / "ssh"
    tool.write_text(FAKE.format(python=sys.executable))
    tool.chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}", "HOME": str(tmp_path)}

    def command(*arguments):
        return launching.command("ssh", f"--port={port}", *arguments)

    def run(text, *flags, arguments=(), more=None):
        (tmp_path / "train it.py").write_text(launching.JOINED + text)
        words, given = command(*flags, "train it.py", *arguments), {**env, **(more or {})}
        done = subprocess.run(words, env=given, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        return done.returncode, done.stdout, done.stderr

    def start(text, *flags):
        (tmp_path / "train it.py").write_text(launching.JOINED + text)
        words, pipe = command(*flags, "train it.py"), subprocess.PIPE
        return subprocess.Popen(words, env=env, cwd=tmp_path, stdout=pipe, stderr=pipe, text=True)

    run.start = start
    return run


# Plans.


def job(**options):
    hosts = (Host("alpha", 2), Host("me@beta", 2, "10.0.0.2"))
    return ssh.SshJob(("train.py", "two words"), hosts=hosts, directory="/data/my project", python="python3", **options)


def test_a_plan_as_text(monkeypatch):
    monkeypatch.setattr(sys, "executable", "python3")
    text = str(ssh.plan(job(shape=Shape(2, 1), env={"A": "b\nc"}, ssh=("-p2200",), gpus_per_worker=1)))
    assert text == (pathlib.Path(__file__).parent / "golden" / "ssh.sh").read_text()


def test_an_option_in_two_words_is_passed_as_two():
    assert job(ssh=("-p 22", "-oProxyCommand=ssh -W %h:%p a", "-i  k k")).ssh == (
        *("-p", "22", "-oProxyCommand=ssh -W %h:%p a", "-i", "k k"),
    )


@pytest.mark.parametrize(
    ("options", "tasks", "unused"),
    [
        ([], ["worker:0", "worker:1", "worker:2", "worker:3"], None),
        (["--num-ps=1"], ["chief:0", "worker:0", "worker:1", "ps:0"], None),
        (["--num_workers=1"], ["worker:0"], "1 of a, 2 of me@b"),
        (["--num_workers=3"], ["worker:0", "worker:1", "worker:2"], "1 of me@b"),
    ],
)
@pytest.mark.parametrize("is_file", [True, False])
def test_workers_fill_all_slots_unless_their_number_is_given(options, tasks, unused, is_file, tmp_path, capsys):
    hosts, path = "--hosts=a:2,me@b:2", tmp_path / "hosts"
    if is_file:
        path.write_text("a slots=2\nme@b slots=2\n")
        hosts = f"--hostfile={path}"
    assert ssh.main([hosts, *options, "--dry_run", "train.py"]) == 0
    shown = capsys.readouterr()
    assert [line[2:] for line in shown.out.splitlines() if line.startswith("# ")] == tasks
    line = f"tfdist: slots that no task takes: {unused}; leave --num_workers away to use all\n"
    assert shown.err == (line if unused else "")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"shape": Shape(5)}, "the hosts have too few slots for 5 tasks (5 worker); add hosts, or write host:N in"),
        ({"port": 65534}, "--port leaves no port for each slot"),
        ({"ssh": ("p2200",)}, "--ssh is no option of ssh"),
    ],
)
def test_jobs_that_make_no_sense(options, words):
    with pytest.raises(requests.LaunchError, match=f"^{re.escape(words)}"):
        job(**options)


# Runs.


@pytest.mark.processes
def test_every_task_runs_on_its_host_and_all_arrives_unchanged(launch):
    odd = ["two words", 'it\'s "$HOME" `x`', "new\nline", "", "é", "--", "-m"]
    text = "print(name, os.environ['FAKE_HOST'], json.dumps([sys.argv[1:], os.environ['ODD']]))"
    code, out, err = launch(text, "--hosts=alpha,me@beta", f"--env=ODD={odd[1]}\n!", "--ssh=-p2200", arguments=odd)
    assert (code, err) == (0, "")
    rest = json.dumps([odd, odd[1] + "\n!"])
    assert sorted(out.splitlines()) == [f"[worker:0] worker:0 alpha {rest}", f"[worker:1] worker:1 me@beta {rest}"]


@pytest.mark.processes
def test_tasks_know_a_secret_that_no_command_line_shows(launch):
    text = """
import pathlib
lines = b"".join(path.read_bytes() for path in pathlib.Path("/proc").glob("[0-9]*/cmdline") if path.exists())
print(len(os.environ["TFDIST_JOB_SECRET"]), os.environ["TFDIST_JOB_SECRET"].encode() in lines)
"""
    assert launch(text, "--hosts=alpha", "--num_workers=1")[:2] == (0, "[worker:0] 64 False\n")


@pytest.mark.processes
def test_when_one_fails_the_others_are_ended_and_its_code_is_returned(launch):
    text = """
def end(*_):
    print(name, "saved", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
print(name, "ready", flush=True)
if name == "worker:1":
    while not os.path.exists("ready"): pass
    sys.exit(7)
open("ready", "w").close()
while True: signal.pause()
"""
    code, out, err = launch(text, "--hosts=alpha,me@beta")
    assert code == 7
    assert "[worker:0] worker:0 saved" in out.splitlines()
    assert "tfdist: worker:1 failed first (exit code 7); all tasks have ended" in err


@pytest.mark.processes
@pytest.mark.parametrize(
    "signum",
    [signal.SIGKILL, *(pytest.param(each, marks=pytest.mark.slow) for each in (signal.SIGTERM, signal.SIGINT))],
)
def test_nothing_outlives_the_launcher(launch, signum):
    # Ignores what is polite, and has a child in a session of its own.
    text = """
for number in (1, 2, 15): signal.signal(number, signal.SIG_IGN)
import subprocess
child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
print("pids", os.getpid(), child.pid, flush=True)
while True: signal.pause()
"""
    with launch.start(text, "--hosts=alpha,me@beta", "--grace_period_secs=1") as launcher:
        lines = [launcher.stdout.readline() for _ in range(2)]
        pids = [int(pid) for line in lines for pid in line.split()[2:]]
        processes = [psutil.Process(pid) for pid in pids]
        assert len(processes) == 4
        launcher.send_signal(signum)
        launcher.wait(30)
        _, alive = psutil.wait_procs(processes, timeout=20)
        assert not alive


# Hosts that are lost while the job runs.


@pytest.mark.processes
def test_a_worker_whose_host_was_away_is_started_again_there(launch, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    text = """
if name == "worker:0" and os.environ["TFDIST_TASK_RESTART"] == "0":
    open("away", "w").write("me@beta 1")
    signal.raise_signal(9)
if name == "worker:0":
    print(os.environ["FAKE_HOST"], os.environ["TFDIST_ATTEMPT"], os.environ["TFDIST_TASK_RESTART"], flush=True)
    open("pipe", "w").close()
elif name == "chief:0":
    open("pipe").read()
else:
    signal.pause()
"""
    flags = "--hosts=me@beta,alpha:3", "--num_ps=1", "--restart_backoff_secs=0", "--grace_period_secs=0.5"
    code, out, err = launch(text, *flags)
    assert (code, out) == (0, "[worker:0] me@beta 0 2\n")
    assert [line for line in err.splitlines() if line.endswith("starting it again")] == [
        "tfdist: worker:0 failed (exit code 137, failure 1 in a row); starting it again",
        "tfdist: worker:0 failed (exit code 255, host me@beta, failure 2 in a row); starting it again",
    ]


# Before anything starts.


@pytest.mark.processes
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--hosts=alpha,gamma"], "gamma can't be reached (ssh: Could not resolve hostname gamma: Name or service not"),
        (["--hosts=alpha:2", "--python=/no/python"], "alpha can't run that interpreter ("),
        (["--hosts=alpha:2", "--directory=/no/where"], "alpha lacks /no/where; copy or mount it there"),
        (["--hosts=alpha:2", "--gpus_per_worker=500"], "alpha has 0 of 1000 GPUs"),
        (["--hosts=silent", "--num_workers=1", "--preflight_secs=0.5"], "silent did not answer within 0.5 s"),
        ([], "say where to run by one of --hosts=a,b and --hostfile=FILE. Received: neither"),
    ],
)
def test_what_can_not_work_is_one_line_that_names_the_host(launch, flags, words):
    code, out, err = launch("", *flags)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert err.startswith(f"tfdist: {words}")


@pytest.mark.processes
def test_a_port_in_use_is_named(launch, port):
    with socket.create_server(("", port)):
        code, _, err = launch("", "--hosts=alpha", "--num_workers=1")
    assert (code, err) == (2, f"tfdist: alpha has port {port} in use; end what holds it, or use another --port\n")


@pytest.mark.processes
def test_other_versions_and_a_wrong_clock_are_told(launch, tmp_path):
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text("import time\nreal = time.time\ntime.time = lambda: real() - 3600\n")
    code, _, err = launch("", "--hosts=alpha", "--num_workers=1", more={"FAKE_CLOCK": str(site)})
    assert code == 0
    assert re.search(r"tfdist: the clock of alpha is -3(600|59\d) s off; set it", err)
    (site / "sitecustomize.py").write_text("import tfdist\ntfdist.__version__ = '0.0.1'\n")
    code, _, err = launch("", "--hosts=alpha", "--num_workers=1", more={"FAKE_CLOCK": str(site)})
    assert code == 2
    assert err.startswith("tfdist: alpha has tfdist 0.0.1 where this machine has ")


# A real server.


@contextlib.contextmanager
def ssh_server(directory):
    """A server of our own on the loopback address; gives the options to reach it."""
    server = shutil.which("sshd") or "/usr/sbin/sshd"
    if not (pathlib.Path(server).exists() and shutil.which("ssh-keygen") and shutil.which("ssh")):
        pytest.skip("there is no OpenSSH server here")
    for key in ("host", "user"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(directory / key)], check=True, timeout=20
        )
    with PortReservation(1) as reservation:
        port = reservation.ports[0]
    config = directory / "config"
    config.write_text(
        f"ListenAddress 127.0.0.1:{port}\nHostKey {directory}/host\nAuthorizedKeysFile {directory}/user.pub\n"
        "StrictModes no\nPidFile none\nPasswordAuthentication no\nKbdInteractiveAuthentication no\n"
    )
    with subprocess.Popen([server, "-D", "-e", "-f", str(config)], stderr=subprocess.PIPE, text=True) as process:
        try:
            deadline = time.monotonic() + 20
            while True:
                with contextlib.suppress(OSError):
                    socket.create_connection(("127.0.0.1", port), 1).close()
                    break
                if process.poll() is not None or time.monotonic() > deadline:
                    process.kill()
                    pytest.skip(f"the OpenSSH server does not start here: {process.stderr.read()[-300:]}")
            known = f"-oUserKnownHostsFile={directory}/known"
            yield [f"-p{port}", f"-i{directory}/user", known, "-oStrictHostKeyChecking=no", "-oLogLevel=ERROR"]
        finally:
            process.terminate()


@pytest.mark.processes
def test_a_real_server_runs_tasks_and_ends_them(tmp_path, port):
    odd = ["two words", 'it\'s "$HOME" `x`', "new\nline", "", "é"]
    (tmp_path / "train it.py").write_text(
        launching.JOINED
        + "print(json.dumps(sys.argv[1:]), os.environ['SET'], os.getpid(), flush=True)\n"
        + "if os.environ['END'] == 'no': signal.pause()\n"
    )
    with ssh_server(tmp_path) as options:
        command = launching.command("ssh", "--hosts=localhost:2", f"--port={port}")
        command += ["--setup=export SET=up"]
        command += [f"--ssh={option}" for option in options]
        done = subprocess.run(
            [*command, "--env=END=yes", "train it.py", *odd], cwd=tmp_path, capture_output=True, text=True, timeout=60
        )
        assert (done.returncode, done.stderr) == (0, "")
        shown = sorted(line.rpartition(" ")[0] for line in done.stdout.splitlines())
        assert shown == [f"[worker:{index}] {json.dumps(odd)} up" for index in range(2)]
        arguments = [*command, "--env=END=no", "train it.py"]
        with subprocess.Popen(arguments, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as launcher:
            tasks = [psutil.Process(int(launcher.stdout.readline().split()[-1])) for _ in range(2)]
            launcher.kill()
            _, alive = psutil.wait_procs(tasks, timeout=20)
            assert not alive
