# SPDX-License-Identifier: Apache-2.0
"""The local launcher: what it plans, whom it waits for, which code it returns, and that nobody is left behind."""

import json
import os
import pathlib
import pty
import signal
import subprocess
import sys

import launching
import psutil
import pytest

from tfdist.launchers import local, requests
from tfdist.launchers.shape import Shape
from tfdist.launchers.supervise import attempts

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def script(tmp_path):
    """Writes a script and gives its path."""

    def write(text, name="train.py"):
        path = tmp_path / name
        path.write_text(launching.JOINED + text)
        return str(path)

    return write


def command(*arguments):
    return launching.command("local", *arguments)


def launch(*arguments, **options):
    done = subprocess.run(command(*arguments), capture_output=True, text=True, timeout=60, cwd=ROOT, **options)
    return done.returncode, done.stdout, done.stderr


# Plans.

GOLDEN = "\n".join(
    f"""\
# {job}:{index}
TF_CONFIG='{{"cluster": {{"chief": ["127.0.0.1:1001"], "worker": ["127.0.0.1:1002", "127.0.0.1:1003"], "ps": \
["127.0.0.1:1004"]}}, "task": {{"type": "{job}", "index": {index}}}}}' TFDIST_LAUNCHER=local \
PYTHONUNBUFFERED=1 python3 train.py '--name=two words'
"""
    for job, index in [("chief", 0), ("worker", 0), ("worker", 1), ("ps", 0)]
)


def test_a_plan_as_text():
    job = local.LocalJob(("train.py", "--name=two words"), Shape(2, 1))
    assert str(local.plan(job, range(1001, 1006), python="python3")) == GOLDEN


def test_the_text_of_a_plan_runs_in_a_shell(script):
    request = local.plan(local.LocalJob((script("print(name, sys.argv[1:])"), "it's", "a\nb")), (1, 2))
    done = subprocess.run(["sh", "-c", str(request)], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == [f"worker:{i} [\"it's\", 'a\\nb']" for i in (0, 1)]


# Runs.


@pytest.mark.processes
def test_every_task_runs_with_its_own_tf_config(script):
    code, out, err = launch("--num_workers=2", "--num_ps=1", script("print(name, os.environ['TFDIST_LAUNCHER'])"))
    assert (code, err) == (0, "")
    assert sorted(out.splitlines()) == [f"[{n}] {n} local" for n in ("chief:0", "ps:0", "worker:0", "worker:1")]


@pytest.mark.processes
def test_one_worker_and_an_evaluator_need_join_no_cluster(tmp_path):
    (tmp_path / "train.py").write_text("print('trained')")
    assert launch("--num_workers=1", "--evaluator", str(tmp_path / "train.py"))[2] == ""


@pytest.mark.processes
def test_job_that_joins_no_cluster_is_reported_while_it_runs(tmp_path):
    (tmp_path / "train.py").write_text("import os, time\nwhile not os.path.exists('end'): time.sleep(0.01)")
    program = "from tfdist.launchers.supervise import attempts; attempts._JOIN_SECS = 0.5; from tfdist import cli; "
    words = [sys.executable, "-c", f"{program}cli.main()", "launch", "local", "--num_workers=2", "train.py"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=env) as launcher:
        lines = [launcher.stderr.readline()]
        (tmp_path / "end").touch()
        lines += launcher.stderr.read().splitlines()
    assert launcher.returncode == 0
    assert lines[0].startswith("tfdist: no task has joined the cluster by a strategy of tfdist")
    assert "() in 0.5 s: unless the script joins it" in lines[0]
    assert lines[0].endswith("each of 2 tasks runs on its own\n")
    # Again at the end, where it is seen.
    assert [line.endswith("each of 2 tasks ran on its own") for line in lines[1:]] == [True]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("tasks", "strategy", "one"),
    [("--num_ps=0", "MultiWorkerMirroredStrategy", "worker:0"), ("--num_ps=1", "ParameterServerStrategy", "chief:0")],
)
def test_a_strategy_that_one_task_alone_builds_does_not_wait_for_who_has_ended(script, tasks, strategy, one):
    alone = script(f"import tfdist\nif name == '{one}': tfdist.{strategy}()")
    code, _, err = launch("--num_workers=2", tasks, alone)
    assert code == 1
    assert "has ended with code 0 and has not joined the cluster; every task must build the strategy" in err


@pytest.mark.processes
def test_arguments_of_the_script_arrive_unchanged(script):
    arguments = ["two words", "'\"$x", "new\nline", "", "é", "--num_workers=9", "--flagfile=none", "--", "-m", "--help"]
    path = script("print(json.dumps(sys.argv[1:]))")
    code, out, err = launch("--num_workers=1", path, *arguments)
    assert code == 0
    assert err.startswith(f"tfdist: --num_workers=9 stands behind {path}, so the script gets it;")
    assert len(err.splitlines()) == 1
    assert json.loads(out.removeprefix("[worker:0] ")) == arguments


@pytest.mark.processes
def test_a_module_runs_too(script):
    path = pathlib.Path(script("print(name, sys.argv[1:])", "training.py"))
    env = {**os.environ, "PYTHONPATH": f"{path.parent}{os.pathsep}{os.environ['PYTHONPATH']}"}
    assert launch("--num_workers", "1", "-m", "training", "-m", env=env) == (0, "[worker:0] worker:0 ['-m']\n", "")


@pytest.mark.processes
def test_the_front_in_the_checkout_is_the_same_command(script, tmp_path):
    front = [sys.executable, str(ROOT / "launch" / "local.py"), "--num_workers=1", script("print('here')")]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(front, capture_output=True, text=True, timeout=60, cwd=tmp_path, env=env)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[worker:0] here\n", "")


@pytest.mark.processes
def test_the_code_of_the_task_that_failed_first_is_returned_and_the_others_are_ended(script):
    path = script("if name == 'worker:1':\n  print('what went wrong')\n  sys.exit(7)\nsignal.pause()")
    code, _, err = launch("--num_workers=3", path)
    assert code == 7
    assert err.splitlines() == [
        "tfdist: worker:1 failed first (exit code 7); ending all tasks",
        "tfdist: the last lines of worker:1:",
        "tfdist:   what went wrong",
        "tfdist: worker:1 failed first (exit code 7); all tasks have ended",
    ]


@pytest.mark.processes
def test_an_exception_of_all_workers_is_printed_once_behind_the_progress(script):
    text = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # so that each raises, whoever is first
import pathlib, time
pathlib.Path(__file__).with_name(name).touch()
while not all(pathlib.Path(__file__).with_name(f"worker:{index}").exists() for index in (0, 1)): time.sleep(0.01)
sys.stdout.write("1/3\\r2/3")
sys.stdout.flush()
raise ValueError("of shape (16, 7)")
"""
    code, out, err = launch("--num_workers=2", "--grace_period_secs=60", script(text))
    assert code == 1
    assert sorted(out.splitlines()) == ["[worker:0] 2/3", "[worker:1] 2/3"]
    assert err.count("Traceback (most recent call last):") == err.count("ValueError: of shape (16, 7)") == 1
    # The first of them is there only if the other one still runs.
    *others, same, last = [line for line in err.splitlines() if line.startswith("tfdist: ")]
    assert same == "tfdist: the same ValueError in all 2 workers"
    assert all("failed first (exit code 1)" in line for line in (*others, last))


@pytest.mark.processes
def test_a_signal_that_ends_a_task_is_128_and_its_number(script):
    code, _, err = launch("--num_workers=2", script("signal.raise_signal(9) if name == 'worker:0' else signal.pause()"))
    assert code == 137
    assert "worker:0 failed first (SIGKILL, exit code 137)" in err
    assert "all tasks have ended; unless you sent it, memory may have run out; start with" in err
    assert err.endswith("; start with --max_restarts=N and tfdist.callbacks.Resume to go on from a checkpoint\n")


@pytest.mark.processes
def test_after_the_chief_succeeded_the_others_are_given_time_and_then_ended(script):
    stubborn = "signal.signal(15, signal.SIG_IGN)\nwhile name != 'chief:0': signal.pause()"
    assert launch("--num_workers=1", "--num_ps=1", "--grace_period_secs=0.2", script(stubborn)) == (0, "", "")


# Ends its peers by ending, and they are unhappy about it: seen from outside, anyone of them may be the first to end.
VANISHING_CHIEF = """
import socket
host, port = json.loads(os.environ["TF_CONFIG"])["cluster"]["chief"][0].split(":")
if name == "chief:0":
    with socket.create_server((host, int(port))) as server:
        peers = [server.accept()[0] for _ in range(3)]
        os._exit(0)
while True:
    try:
        peer = socket.create_connection((host, int(port)))
        break
    except ConnectionRefusedError:
        pass
peer.recv(1)
os._exit(5)
"""


@pytest.mark.processes
def test_others_that_end_badly_because_the_chief_succeeded_decide_nothing(script):
    assert launch("--num_workers=2", "--num_ps=1", "--grace_period_secs=30", script(VANISHING_CHIEF)) == (0, "", "")


@pytest.mark.processes
def test_a_reader_that_goes_away_ends_the_job(script):
    path = script("while True: print('line')")
    with subprocess.Popen(command("--num_workers=2", path), stdout=subprocess.PIPE, cwd=ROOT) as launcher:
        launcher.stdout.readline()
        launcher.stdout.close()
        assert launcher.wait(30) == 128 + signal.SIGPIPE


@pytest.mark.processes
@pytest.mark.parametrize("is_stopped", [False, True], ids=["runs", "stopped"])
@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_ends_everything(script, signum, code, is_stopped):
    with subprocess.Popen(
        command(script("print(os.getpid())\nsignal.pause()")), stdout=-1, text=True, cwd=ROOT
    ) as launcher:
        tasks = [psutil.Process(int(launcher.stdout.readline().split()[1])) for _ in range(2)]
        if is_stopped:
            launcher.send_signal(signal.SIGSTOP)
        launcher.send_signal(signum)
        launcher.send_signal(signal.SIGCONT)
        assert launcher.wait(30) == code
    assert not any(task.is_running() for task in tasks)


QUIET = """
print(f'{name} says {os.environ["TF_CPP_MIN_LOG_LEVEL"]}')  # in one write, because worker:0 may be ended in between
if name == "worker:1":
    print("the cause", file=sys.stderr)
    sys.exit(3)
signal.pause()
"""


@pytest.mark.processes
def test_quiet_workers_print_only_the_chief_and_who_fails(script, tmp_path):
    env = {name: value for name, value in os.environ.items() if name != "TF_CPP_MIN_LOG_LEVEL"}
    flags = ("--num_workers=3", "--quiet_workers", "--run=1", f"--task_logs={tmp_path}")
    code, out, err = launch(*flags, script(QUIET), env=env)
    assert code == 3
    assert out.splitlines() in ([], ["[worker:0] worker:0 says 1"])
    first, *lines = err.splitlines()
    assert first == "tfdist: worker:1 failed first (exit code 3); ending all tasks"
    assert lines[0] == "tfdist: the last lines of worker:1:"
    assert sorted(lines[1:3]) == ["tfdist:   the cause", "tfdist:   worker:1 says 1"]
    log = tmp_path / "1" / "attempt_0" / "worker_1"
    assert lines[3] == f"tfdist: its output is below {log.parent}"
    assert lines[4] == "tfdist: worker:1 failed first (exit code 3); all tasks have ended"
    assert (log / "stdout.log").read_text() == "worker:1 says 1\n"
    assert (log / "stderr.log").read_text() == "the cause\n"


@pytest.mark.processes
def test_a_second_signal_ends_everything_at_once(script):
    stubborn = (
        "for signum in (2, 15): signal.signal(signum, signal.SIG_IGN)\nprint('ready')\nwhile True: signal.pause()"
    )
    arguments = command("--grace_period_secs=1000", script(stubborn))
    with subprocess.Popen(arguments, stdout=-1, stderr=-1, text=True, cwd=ROOT) as launcher:
        assert [launcher.stdout.readline().split()[1] for _ in range(2)] == ["ready"] * 2
        launcher.send_signal(signal.SIGINT)
        assert "SIGINT: ending all tasks" in launcher.stderr.readline()
        launcher.send_signal(signal.SIGINT)
        assert launcher.wait(30) == 130


@pytest.mark.processes
def test_nohup_is_respected(script, tmp_path):
    os.mkfifo(tmp_path / "go")
    path = script("print('ready')\nopen(sys.argv[1]).read()")
    arguments = ["nohup", *command("--num_workers=1", path, str(tmp_path / "go"))]
    with subprocess.Popen(arguments, stdout=-1, stderr=-1, text=True, cwd=ROOT) as launcher:
        assert "ready" in launcher.stdout.readline()
        launcher.send_signal(signal.SIGHUP)
        (tmp_path / "go").write_text("go")
        assert launcher.wait(30) == 0


@pytest.mark.processes
def test_ctrl_c_in_a_terminal_ends_everything(script):
    """The terminal sends SIGINT to its foreground group only, and the tasks are in sessions of their own."""
    path = script(
        "try:\n  print(f'pid {os.getpid()}.')\n  signal.pause()\nexcept KeyboardInterrupt:\n  print('saved.')"
    )
    own_terminal = (
        "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
    )
    keyboard, terminal = pty.openpty()
    arguments = [sys.executable, "-c", own_terminal, *command("--num_workers=2", path)]
    env = {**os.environ, "TERM": "xterm"}
    launcher = subprocess.Popen(
        arguments, stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True, cwd=ROOT, env=env
    )
    os.close(terminal)
    screen = read_until(keyboard, lambda text: text.count("pid ") == 2 and text.count(".") == 2)
    tasks = [psutil.Process(int(line.split("pid ")[1].rstrip(".\r"))) for line in screen.splitlines() if "pid " in line]
    os.write(keyboard, b"\x03")
    assert launcher.wait(30) == 130
    screen += read_until(keyboard, lambda text: False)
    os.close(keyboard)
    assert screen.count("saved.") == 2
    assert "[worker:0] " in screen and "\x1b[" not in screen
    assert not any(task.is_running() for task in tasks)


def read_until(descriptor, enough):
    text = ""
    while not enough(text):
        try:
            data = os.read(descriptor, 4096)
        except OSError:  # The other end of a terminal is closed.
            data = b""
        if not data:
            return text
        text += data.decode()
    return text


@pytest.mark.processes
def test_a_program_may_submit_a_job_and_keeps_its_signal_handlers(script, capsys):
    before = [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    assert attempts.run_tasks(local.plan(local.LocalJob((script("print('here')"),), Shape(1)), (1,))) == 0
    assert [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before


# The command line.


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["python3", "a.py"], "tfdist: the script is started by Python; leave 'python3' out. Received: python3 a.py"),
        (["nope.py"], "tfdist: the script does not exist (looked in {root}); check its name. Received: 'nope.py'"),
        (["tests"], "tfdist: the script is a directory without __main__.py; name a file. Received: 'tests'"),
        (["x" * 5000], "tfdist: the script can't be looked up"),
        (["/dev/null"], "tfdist: the script is no file, and each task reads it by itself; write it to one."),
        (["-m", "no_such_module.x"], "tfdist: there is no such module; check its name and PYTHONPATH."),
        (["-m", "--x"], "tfdist: -m has no module; write -m MODULE, and flags before -m. Received: -m --x"),
        ([], "tfdist: there is no script to run"),
    ],
)
def test_a_command_line_that_makes_no_sense_is_one_line_and_code_2(arguments, words):
    code, out, err = launch(*arguments)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert err.startswith(words.format(root=ROOT))


def test_an_unreadable_script_is_refused(script, monkeypatch):
    path = script("pass")
    monkeypatch.setattr(os, "access", lambda *_: False)  # Root may read everything.
    with pytest.raises(requests.LaunchError, match="is not readable"):
        requests.check_command([path])


def test_a_dry_run_starts_nothing(script):
    path = script("raise SystemExit(1)")
    code, out, err = launch("--num_workers=2", "--dry_run", path, "--x")
    assert (code, err) == (0, "")
    assert [line for line in out.splitlines() if line.startswith("#")] == ["# worker:0", "# worker:1"]
    assert out.count(f"{sys.executable} {path} --x\n") == 2
