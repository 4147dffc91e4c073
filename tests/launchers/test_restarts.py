# SPDX-License-Identifier: Apache-2.0
"""The local launcher starts a job again, tells failures from preemptions, and logs each attempt of each task."""

import signal
import subprocess
import types

import launching
import pytest

from tfdist.launchers import requests
from tfdist.launchers.shape import Shape
from tfdist.launchers.supervise import output

PREAMBLE = f"""{launching.JOINED}
attempt = int(os.environ["TFDIST_ATTEMPT"])
"""


@pytest.fixture
def launch(tmp_path):
    """Runs a script in a directory of its own; gives the code and both streams."""

    def run(text, *flags):
        (tmp_path / "train.py").write_text(PREAMBLE + text)
        command = launching.command("local", "--restart_backoff_secs=0", *flags, "train.py")
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        return done.returncode, done.stdout.splitlines(), done.stderr.splitlines()

    return run


@pytest.mark.processes
def test_after_a_failure_all_tasks_start_again(launch):
    text = "print(attempt)\nif attempt < 2 and name == 'worker:1': sys.exit(3)\nif attempt < 2: signal.pause()"
    code, out, err = launch(text, "--max_restarts=2")
    assert code == 0
    assert {"[worker:1] 0", "[worker:1] 1", "[worker:1] 2", "[worker:0] 2"} <= set(out)
    assert [line for line in err if "again" in line] == [
        f"tfdist: starting all tasks again in 0 s (restart {n} of 2)" for n in (1, 2)
    ]


@pytest.mark.processes
def test_one_that_still_saves_is_waited_for_when_others_were_preempted(launch):
    text = """
if attempt == 0 and name != "worker:0":
    sys.exit(75)
if attempt == 0:
    import time
    time.sleep(1)  # as long as it takes to write
    print("saved", flush=True)
    sys.exit(75)
"""
    code, out, err = launch(text, "--num_workers=3")
    assert (code, out) == (0, ["[worker:0] saved"])
    assert "tfdist: starting all tasks again in 0 s (preemption 1)" in err


@pytest.mark.processes
def test_preemptions_are_no_failures(launch):
    code, out, err = launch(
        "print(attempt)\nsys.exit([75, 75, 1, 75, 0][attempt])", "--num_workers=1", "--max_restarts=1"
    )
    assert (code, len(out)) == (0, 5)
    assert "tfdist: starting all tasks again in 0 s (preemption 3)" in err
    code, out, err = launch("print(attempt)\nsys.exit(75)", "--num_workers=1", "--max_preemptions=2")
    assert (code, len(out)) == (75, 3)
    assert err[-1] == "tfdist: not starting again: --max_preemptions=2 is used up"


@pytest.mark.processes
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_wrapper_counts_although_survivors_end_with_75(launch, signum):
    """Kills the wrapper of worker:1 from outside. The worker would save on SIGTERM, and worker:0 misses it at once."""
    text = f"""
if attempt: sys.exit(0)
if not os.path.exists("pipe"):
    try: os.mkfifo("pipe")
    except FileExistsError: pass
if name == "worker:0":
    open("pipe").read()  # Until worker:1 is gone.
    sys.exit(75)
held = open("pipe", "w")
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
os.kill(os.getppid(), {int(signum)})
while True: signal.pause()
"""
    code, _, err = launch(text, "--max_restarts=1")
    assert code == 0
    assert err[-1] == "tfdist: starting all tasks again in 0 s (restart 1 of 1)"
    assert "tfdist: worker:1 failed first" in err[-2]


@pytest.mark.processes
def test_each_attempt_of_each_task_has_its_files(launch, tmp_path):
    text = "print('out', attempt)\nprint('err', file=sys.stderr)\nsys.exit(75 if attempt == 0 else 0)"
    code, out, err = launch(text, "--num_workers=2", "--task_logs=logs", "--run=first", "--notee")
    assert (code, out) == (0, [])
    assert all(line.startswith("tfdist: ") for line in err)
    assert "tfdist: its output is below logs/first/attempt_0" in err
    run = tmp_path / "logs" / "first"
    for task in ("worker_0", "worker_1"):
        assert (run / "attempt_1" / task / "stdout.log").read_text() == "out 1\n"
        assert (run / "attempt_1" / task / "stderr.log").read_text() == "err\n"
    code, _, err = launch(text, "--task_logs=logs", "--run=first")
    assert (code, err) == (2, ["tfdist: --run is a folder in logs; use another. Received: 'first'"])


@pytest.mark.processes
def test_a_signal_ends_the_wait_for_a_restart(tmp_path):
    (tmp_path / "train.py").write_text("raise SystemExit(1)")
    command = launching.command("local", "--max_restarts=1", "--restart_backoff_secs=1000", "train.py")
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as launcher:
        while "again in 1000 s" not in launcher.stderr.readline():
            pass
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(20) == 143


def test_logs_say_once_that_the_disk_refuses(tmp_path):
    said = []
    logs = output.TaskLogs(tmp_path / "run", 0, said.append)
    worker, ps = (types.SimpleNamespace(name=name, restart=0) for name in ("worker:0", "ps:0"))
    logs.write(worker, ["red"], error=False)
    (tmp_path / "run" / "attempt_0" / "ps_0").write_text("in the way")
    for _ in range(2):
        logs.write(ps, ["line"], error=True)
    output.TaskLogs(tmp_path / "run" / "attempt_0" / "ps_0", 0, said.append).write(worker, [""], error=False)
    assert (tmp_path / "run" / "attempt_0" / "worker_0" / "stdout.log").read_text() == "red\n"
    assert [line.partition(": [Errno")[0] for line in said] == [f"can't log what {x.name} prints" for x in (ps, worker)]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: output.LogSettings(tee=False), "--notee would lose all output"),
        (lambda: output.LogSettings("logs", "../x"), "--run is no name for a folder"),
        (lambda: Shape(num_ps=1, chief=False), "--nochief leaves no task to coordinate"),
    ],
)
def test_what_makes_no_sense(make, words):
    with pytest.raises(requests.LaunchError) as caught:
        make()
    assert str(caught.value).startswith(words)
