# SPDX-License-Identifier: Apache-2.0
"""Child processes end with their parent, whatever ends the parent, and take along all that they started."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from tfdist.launchers.supervise import processes
from tfdist.launchers.supervise.processes import Supervisor

pytestmark = pytest.mark.processes

# Ignores every polite signal, and has descendants in its own group, in another session, and as a daemon.
STUBBORN = """
import os, signal, subprocess, sys, time
for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(signum, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "1000"])
session = subprocess.Popen(["sleep", "1000"], start_new_session=True)
shell = "setsid sleep 1000 >/dev/null 2>&1 & echo $!"
daemon = subprocess.run(["sh", "-c", shell], stdout=subprocess.PIPE, text=True).stdout
print("pids", os.getpid(), child.pid, session.pid, int(daemon), flush=True)
time.sleep(1000)
"""
# A parent with two such tasks, started from a thread that ends at once.
PARENT = f"""
import sys, threading
from tfdist.launchers.supervise.output import Console
from tfdist.launchers.supervise.processes import Supervisor
supervisor = Supervisor(Console())
def start():
    for name in "ab":
        supervisor.start(name, [sys.executable, "-c", {STUBBORN!r}])
starting = threading.Thread(target=start)
starting.start()
starting.join()
print("started", flush=True)
"""


class Lines(Supervisor):
    """A supervisor whose tasks' output lands in a list."""

    def __init__(self):
        super().__init__(console=self)
        self.lines = []
        self.arrived = threading.Condition()

    def write(self, prefix, lines, error=False):
        with self.arrived:
            self.lines += [(prefix, line, error) for line in lines]
            self.arrived.notify_all()

    def first(self, word):
        """Waits for a line that starts with `word`."""
        with self.arrived:
            self.arrived.wait_for(lambda: any(line.startswith(word) for _, line, _ in self.lines), timeout=30)
            return next(line for _, line, _ in self.lines if line.startswith(word))


@pytest.fixture
def supervisor():
    with Lines() as supervisor:
        yield supervisor


def python(code, *arguments):
    return [sys.executable, "-c", code, *arguments]


def test_a_second_process_of_a_name_continues_the_first(supervisor):
    for name in ("a", "b", "a"):
        supervisor.start(name, python("print()")).wait(30)
    assert [process.restart for process in supervisor.processes] == [0, 0, 1]
    assert all(0 < process.ran_secs == process.ran_secs for process in supervisor.processes), "it stands still"


def pids_in(line):
    """Returns the processes that have not ended by now, which is enough where their parent ends by itself."""
    found = []
    for pid in line.split("pids ")[1].split():
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(int(pid)))
    return found


def left_over(running, timeout_secs=20):
    """Returns the processes that do not end. A zombie has ended: in some containers nobody collects orphans."""
    deadline = time.monotonic() + timeout_secs
    while running and time.monotonic() < deadline:
        _, alive = psutil.wait_procs(running, timeout=0.05)
        running = [process for process in alive if not is_zombie(process)]
    return running


def is_zombie(process):
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def marked(mark):
    """Every process on this machine that inherited `mark` in its environment."""
    return [p for p in psutil.process_iter(["environ"]) if (p.info["environ"] or {}).get("TFDIST_TEST_MARK") == mark]


@pytest.mark.parametrize(("code", "expected"), [("pass", 0), ("raise SystemExit(3)", 3), ("import os; os.abort()", -6)])
def test_return_codes(supervisor, code, expected):
    process = supervisor.start("a", python(code))
    assert process.wait(30) == process.returncode == expected


def test_a_program_that_is_not_there_is_127(supervisor):
    process = supervisor.start("a", ["/no/such/program"])
    assert process.wait(30) == 127
    assert process.tail == ["can't run /no/such/program: [Errno 2] No such file or directory"]


def test_the_process_id_is_that_of_the_task_and_its_group(supervisor):
    process = supervisor.start("a", python("import os; print(os.getpid(), os.getpgrp(), os.getsid(0))"))
    assert process.wait(30) == 0
    assert process.tail == [f"{process.pid} {process.pid} {process.pid}"]


def test_a_task_has_no_input_default_signals_and_only_standard_descriptors(supervisor):
    code = (
        "import os, signal, sys\n"
        "assert sys.stdin.read() == ''\n"
        "assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL\n"
        "assert signal.getsignal(signal.SIGINT) == signal.default_int_handler\n"
        "assert not signal.pthread_sigmask(signal.SIG_BLOCK, [])\n"
        "assert [fd for fd in range(3, 100) if os.path.exists(f'/proc/self/fd/{fd}')] == []"
    )
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGCHLD])
    try:
        process = supervisor.start("a", python(code))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert process.wait(30) == 0, process.tail


def test_output_and_errors_are_told_apart_and_complete(supervisor):
    code = "import sys; print('out'); print('err', file=sys.stderr); sys.stdout.write('no end')"
    supervisor.start("a", python(code)).wait(30)
    assert sorted(supervisor.lines) == [("[a] ", "err", True), ("[a] ", "no end", False), ("[a] ", "out", False)]


def test_the_first_to_end_is_told_first(supervisor):
    supervisor.start("slow", python("import time; time.sleep(1000)"))
    supervisor.start("quick", python("raise SystemExit(5)"))
    ended = supervisor.wait_first_exit(30)
    assert (ended.name, ended.returncode) == ("quick", 5)
    assert [process.name for process in supervisor.running] == ["slow"]
    assert supervisor.wait_first_exit(0.01) is None
    supervisor.start("third", python("")).wait(30)
    assert supervisor.wait_first_exit(0).name == "third"


def test_stop_is_polite_first_and_may_be_called_again(supervisor):
    code = "import signal, sys; signal.signal(15, lambda *_: sys.exit(9)); print('ready', flush=True); signal.pause()"
    process = supervisor.start("a", python(code))
    supervisor.first("ready")
    assert supervisor.stop(grace_secs=30)
    assert supervisor.stop()
    assert process.returncode == 9


def test_stop_ends_what_is_stubborn_and_all_that_it_started(supervisor):
    process = supervisor.start("a", python(STUBBORN))
    descendants = pids_in(supervisor.first("pids"))
    assert supervisor.stop(grace_secs=0.1)
    assert process.returncode == -signal.SIGKILL
    assert not left_over(descendants)


def test_stop_ends_a_stopped_process_without_waiting_for_the_grace_period(supervisor):
    process = supervisor.start("a", python("print('ready', flush=True); import signal; signal.pause()"))
    supervisor.first("ready")
    os.kill(process.pid, signal.SIGSTOP)
    assert supervisor.stop(grace_secs=100)
    assert process.returncode == -signal.SIGTERM


def test_what_a_task_leaves_running_ends_with_it(supervisor):
    process = supervisor.start("a", python(STUBBORN.replace("time.sleep(1000)", "")))
    descendants = [each for each in pids_in(supervisor.first("pids")) if each.pid != process.pid]
    assert process.wait(30) == 0
    assert not left_over(descendants)


def test_killing_the_guard_kills_the_task(supervisor):
    process = supervisor.start("a", python("print('ready', flush=True); import signal; signal.pause()"))
    supervisor.first("ready")
    task = psutil.Process(process.pid)
    task.parent().kill()
    assert process.wait(30) == -signal.SIGKILL
    assert not left_over([task])


def test_a_guard_told_to_end_is_the_cause_not_what_the_task_makes_of_it(supervisor):
    """A task that saves its work ends with 75, as after a preemption of the whole job."""
    handle = (
        "import signal, sys; signal.signal(15, lambda *_: sys.exit(75)); print('ready', flush=True); signal.pause()"
    )
    process = supervisor.start("a", python(handle))
    supervisor.first("ready")
    psutil.Process(process.pid).parent().terminate()
    assert process.wait(30) == -signal.SIGTERM


def test_a_forked_copy_of_this_program_ends_nothing(supervisor):
    process = supervisor.start("a", python("print('ready', flush=True); import signal; signal.pause()"))
    supervisor.first("ready")
    copy = os.fork()
    if copy == 0:
        os._exit(0 if supervisor.stop() else 1)
    assert os.waitpid(copy, 0)[1] == 0
    assert process.wait(0.2) is None


def start_parent(then):
    parent = subprocess.Popen(python(PARENT + then), stdout=subprocess.PIPE, text=True, bufsize=1)
    lines = [parent.stdout.readline() for _ in range(3)]
    return parent, [process for line in lines if "pids" in line for process in pids_in(line)]


def test_nobody_outlives_a_killed_parent():
    started = [start_parent("import signal; signal.pause()") for _ in range(4)]
    for parent, descendants in started:
        assert len(descendants) == 8
        parent.kill()
    for parent, descendants in started:
        parent.communicate(timeout=30)
        assert not left_over(descendants)


@pytest.mark.parametrize("batch", range(2))
def test_nobody_outlives_a_parent_that_is_killed_while_it_starts_them(batch):
    code = PARENT.replace("def start():", "def start():\n    print('starting', flush=True)")
    mark = f"{os.getpid()}-{batch}"
    env = {**os.environ, "TFDIST_TEST_MARK": mark}
    parents = [subprocess.Popen(python(code), stdout=subprocess.PIPE, text=True, env=env) for _ in range(4)]
    for number, parent in enumerate(parents):
        assert parent.stdout.readline() == "starting\n"
        for _ in range(number * 2_000):  # A little later each time, so that different moments are hit.
            parent.poll()
        parent.kill()
    for parent in parents:
        parent.communicate(timeout=30)
    # A process that is just being started may show up in a later look only.
    while found := marked(mark):
        assert not left_over(found)


@pytest.mark.parametrize("end", ["raise ValueError", "sys.exit(3)", "import os; os._exit(3)", "import os; os.abort()"])
def test_nobody_outlives_a_parent_that_ends_by_itself(end):
    parent, descendants = start_parent(end)
    parent.communicate(timeout=30)
    assert not left_over(descendants)


def test_a_forked_child_of_the_parent_keeps_nobody_alive():
    fork = "import os, signal\nchild = os.fork()\nif child: print('child', child, flush=True)\nsignal.pause()"
    parent = subprocess.Popen(python(PARENT + fork), stdout=subprocess.PIPE, text=True, bufsize=1)
    lines = sorted(parent.stdout.readline() for _ in range(4))
    descendants = pids_in(lines[0]) + pids_in(lines[1])
    child = psutil.Process(int(lines[2].split()[1]))
    parent.kill()
    try:
        assert not left_over(descendants)
        assert child.is_running()
    finally:
        child.kill()
        parent.communicate(timeout=30)


def test_the_guard_imports_almost_nothing():
    command = [sys.executable, "-I", "-S", "-X", "importtime", processes._GUARD, str(os.getpid()), "true"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=30, check=True)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "select" in imported
    assert not imported & {"subprocess", "typing", "pathlib", "socket", "threading", "contextlib", "tfdist", "site"}
