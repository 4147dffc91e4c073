# SPDX-License-Identifier: Apache-2.0
"""Real tasks: a parameter server's worker is replaced alone, and a job goes on with fewer workers."""

import os
import signal
import subprocess

import launching
import psutil
import pytest

pytestmark = pytest.mark.processes

PREAMBLE = f"""{launching.JOINED}
workers = json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"]
attempt, restart = (int(os.environ[key]) for key in ("TFDIST_ATTEMPT", "TFDIST_TASK_RESTART"))

def tell(): open("pipe", "w").write("now")
def wait_for_it(): open("pipe").read()
def wait_for_all(count):
    # Not closed in between, so that nobody tells in vain.
    pipe, heard = os.open("pipe", os.O_RDWR), b""
    while len(heard) < 3 * count: heard += os.read(pipe, 3)
"""


@pytest.fixture
def launch(tmp_path):
    """Runs a script in a directory of its own, in which there is a pipe; gives the code and both streams."""
    os.mkfifo(tmp_path / "pipe")

    def command(*flags):
        return launching.command("local", *flags, "train.py")

    def run(text, *flags):
        (tmp_path / "train.py").write_text(PREAMBLE + text)
        done = subprocess.run(command(*flags), cwd=tmp_path, capture_output=True, text=True, timeout=60)
        return done.returncode, done.stdout.splitlines(), done.stderr.splitlines()

    def start(text, *flags):
        (tmp_path / "train.py").write_text(PREAMBLE + text)
        return subprocess.Popen(command(*flags), cwd=tmp_path, stdout=-1, stderr=-1, text=True)

    run.start = start
    return run


def said(err):
    """Returns the launcher's own messages, without the last lines of a task, and each failure once."""
    lines = [line.removeprefix("tfdist: ") for line in err if line.startswith("tfdist: ")]
    lines = [line for line in lines if not line.endswith("; ending all tasks")]
    return [line for line in lines if not line.startswith((" ", "the last lines of "))]


PS = ("--num_ps=1", "--restart_backoff_secs=0", "--grace_period_secs=0.2")


# Parameter servers.


def test_a_killed_worker_is_started_again_alone_with_files_of_its_own(launch, tmp_path):
    text = """
print(attempt, restart, *workers, flush=True)
if name == "chief:0": wait_for_it()
elif name == "worker:1" and not restart: os.kill(os.getpid(), signal.SIGKILL)
elif name == "worker:1": tell()
else: signal.pause()
"""
    code, out, err = launch(text, *PS, "--task_logs=logs", "--run=first")
    assert (code, err) == (
        0,
        ["tfdist: worker:1 failed (SIGKILL, exit code 137, failure 1 in a row); starting it again"],
    )
    first, again = (line for line in out if line.startswith("[worker:1]"))
    assert first.startswith("[worker:1] 0 0 ")
    assert again == first.replace("0 0", "0 1", 1)
    assert len(out) == 5
    folder = tmp_path / "logs" / "first" / "attempt_0" / "worker_1"
    assert [(folder / name).read_text().split()[1] for name in ("stdout.log", "stdout.1.log")] == ["0", "1"]


@pytest.mark.parametrize(("victim", "code"), [("ps:0", 4), ("chief:0", 5)])
def test_a_ps_or_chief_that_fails_restarts_all(launch, victim, code):
    text = f"""
print(name, attempt, restart, flush=True)
if attempt:
    # The chief's end is that of all, and they have little time from then on.
    wait_for_all(3) if name == "chief:0" else tell()
    sys.exit(0)
if name == "worker:1" and not restart: sys.exit(9)
if name == "worker:1": tell()
elif name == "{victim}":
    wait_for_it()
    sys.exit({code})
signal.pause()
"""
    found, out, err = launch(text, *PS, "--max_restarts=1")
    assert found == 0
    assert f"{victim} failed first (exit code {code}); all tasks have ended" in said(err)
    assert said(err)[-1] == "starting all tasks again in 0 s (restart 1 of 1)"
    assert "[worker:1] worker:1 0 1" in out
    assert {f"[{each}] {each} 1 0" for each in ("chief:0", "worker:0", "worker:1", "ps:0")} <= set(out)


def test_a_signal_ends_the_wait_for_a_replacement(launch):
    text = """
for signum in (signal.SIGTERM, signal.SIGINT): signal.signal(signum, signal.SIG_DFL)
print("pid", os.getpid(), flush=True)
sys.exit(1) if name == "worker:1" else signal.pause()
"""
    flags = "--num_ps=1", "--restart_backoff_secs=1000"
    with launch.start(text, *flags) as launcher:
        lines = [launcher.stderr.readline() for _ in range(2)]
        assert lines[1] == "tfdist: worker:1 failed (exit code 1, failure 2 in a row); starting it again in 1000 s\n"
        launcher.send_signal(signal.SIGTERM)
        out, _ = launcher.communicate(timeout=30)
        assert launcher.returncode == 143
    assert not [pid for pid in (int(line.split()[2]) for line in out.splitlines()) if psutil.pid_exists(pid)]


def test_a_replacement_that_listens_to_nobody_does_not_delay_the_end(launch):
    """The chief ends before the replacement has met it. The grace period is not what ends it: that is far too long."""
    text = """
if name == "worker:1" and not restart: sys.exit(9)
if name == "worker:1":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    tell()
    while True: signal.pause()
if name == "chief:0": wait_for_it()
"""
    code, _, err = launch(text, "--num_ps=1", "--grace_period_secs=1000")
    assert (code, said(err)) == (0, ["worker:1 failed (exit code 9, failure 1 in a row); starting it again"])


# All-reduce.

ALL_REDUCE = ("--num_workers=3", "--restart_backoff_secs=0", "--max_worker_restarts=1", "--grace_period_secs=0.2")
BAD = """
print(attempt, *workers, flush=True)
if len(workers) == 3: sys.exit(4) if name == "worker:0" else signal.pause()
"""


def test_the_first_worker_is_left_out_and_the_next_one_leads(launch):
    code, out, err = launch(BAD, *ALL_REDUCE, "--min_workers=2", "--max_restarts=5")
    assert code == 0
    whole = next(line.split()[2:] for line in out if line.startswith("[worker:0] 0 "))
    last = [line.split() for line in out if line.split()[1] == "2"]
    assert sorted(last) == [[f"[worker:{index}]", "2", *whole[1:]] for index in (0, 1)]
    assert said(err) == [
        "worker:0 failed first (exit code 4); all tasks have ended",
        "starting all tasks again in 0 s (restart 1 of 5)",
        "worker:0 failed first (exit code 4); all tasks have ended",
        "going on with 2 of 3 workers, numbered anew, without worker:0: starting all tasks again",
    ]
