# SPDX-License-Identifier: Apache-2.0
"""The Slurm launcher on a real Slurm of four nodes (`make test-slurm`): preemption, limits, waiting, what is left."""

import json
import pathlib
import signal
import subprocess

import launching
import psutil
import pytest
import real_slurm
from waiting import wait_until

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(real_slurm.missing() is not None, reason=real_slurm.missing() or ""),
]
PREAMBLE = f"""{launching.PREAMBLE}
import pathlib
attempt = int(os.environ["TFDIST_ATTEMPT"])
def started(): pathlib.Path(f"{{name}}.{{attempt}}.{{os.getpid()}}").touch()
"""
TRAINING = (pathlib.Path(__file__).parent / "slurm_training.py").read_text()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with real_slurm.start(tmp_path_factory.mktemp("cluster") / "slurm") as running:
        yield running


class Run:
    """A job that was submitted, and what it printed."""

    def __init__(self, cluster, folder, job):
        self.cluster, self.folder, self.job = cluster, folder, job

    @property
    def lines(self):
        output = self.folder / f"slurm-{self.job}.out"
        return output.read_text(errors="replace").splitlines() if output.exists() else []

    def await_files(self, pattern, count):
        """Waits until the tasks have made so many files; returns their names."""

        def found():
            return sorted(path.name for path in self.folder.glob(pattern))

        wait_until(lambda: len(found()) >= count, 200, lambda: f"{pattern} {found()} {self.lines[-30:]}")
        return found()

    def preempt(self):
        """Submits a job of higher priority for all nodes, and waits until it has had them."""
        command = ["sbatch", "--parsable", "--partition=high", "--nodes=4", "--exclusive", "--wrap=true"]
        other = self.cluster.run([*command, "--output=/dev/null"], cwd=self.folder).stdout.strip()
        self.cluster.wait_state(other, "COMPLETED")

    def end(self):
        """Waits for the end; returns the state and the exit code."""
        fields = self.cluster.wait_state(self.job, "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")
        return fields["JobState"], int(fields["ExitCode"].partition(":")[0])

    def left(self):
        """Returns the files that the launcher has left beside the script once no node runs the job any more."""
        wait_until(lambda: not self.cluster.run(["squeue", "--noheader"]).stdout.strip())
        return [path.name for path in self.folder.glob(".tfdist*")]


@pytest.fixture
def submit(cluster, tmp_path):
    """Submits a script to the cluster, and clears the cluster at the end."""

    def run(text, *flags, arguments=()):
        (tmp_path / "train.py").write_text(PREAMBLE + text)
        done = cluster.run(command(*flags, arguments=arguments), cwd=tmp_path)
        assert done.returncode == 0, done
        return Run(cluster, tmp_path, done.stdout.strip())

    yield run
    cluster.clear()


def command(*flags, arguments=()):
    return launching.command("slurm", *flags, "train.py", *arguments)


# A preemption is one, whoever was ready for it.


@pytest.mark.parametrize("shape", [("--num_workers=3",), ("--num_workers=2", "--num_ps=1")])
def test_a_preempted_job_without_a_handler_runs_again(submit, shape):
    text = "started()\nif attempt == 0: time.sleep(300)\nprint('done')"
    run = submit(text, *shape)
    run.await_files("*.0.*", 3)
    run.preempt()
    assert run.end() == ("COMPLETED", 0), run.lines
    assert "tfdist: queuing the job again (preemption 1)" in run.lines
    assert not any("failed first" in line for line in run.lines)
    assert run.left() == []


def test_a_script_gets_each_sigterm_once(submit):
    text = """
def note(*_):
    with open(f"{name}.terms", "a") as file: file.write("TERM\\n")
    time.sleep(2)
    sys.exit(75)
signal.signal(signal.SIGTERM, note)
started()
while attempt == 0: signal.pause()
"""
    text = text.replace("def note(*_):", "def note(*_):\n    signal.pthread_sigmask(signal.SIG_UNBLOCK, [15])")
    run = submit(text, "--num_workers=4")
    run.await_files("*.0.*", 4)
    run.preempt()
    assert run.end() == ("COMPLETED", 0), run.lines
    assert [path.read_text() for path in run.folder.glob("*.terms")] == ["TERM\n"] * 4


@pytest.mark.parametrize("kind", ["multi_worker", "parameter_server"])
def test_a_preempted_training_goes_on_from_its_checkpoint(submit, kind):
    shape = ["--num_workers=3"] if kind == "multi_worker" else ["--num_workers=2", "--num_ps=1", "--tasks_per_node=2"]
    run = submit(TRAINING, *shape, arguments=[kind])
    run.await_files("batches.0", 1)
    run.preempt()
    assert run.end() == ("COMPLETED", 0), run.lines
    assert "tfdist: queuing the job again (preemption 1)" in run.lines
    assert any("is saved in" in line and "ending with code 75" in line for line in run.lines), run.lines
    assert any("going on from" in line for line in run.lines), run.lines
    assert any(line.startswith("[") and "trained 400 steps" in line for line in run.lines), run.lines
    assert run.left() == []


@pytest.mark.parametrize("kind", ["multi_worker", "parameter_server"])
def test_a_job_preempted_in_validation_runs_again(submit, kind):
    shape = ["--num_workers=3"] if kind == "multi_worker" else ["--num_workers=2", "--num_ps=1", "--tasks_per_node=2"]
    run = submit(TRAINING, *shape, arguments=[kind, "evaluate"])
    run.await_files("evaluating.0", 1)
    run.preempt()
    assert run.end() == ("COMPLETED", 0), run.lines
    assert "tfdist: queuing the job again (preemption 1)" in run.lines
    assert any("trained 400 steps" in line for line in run.lines), run.lines


# Limits.


def test_preemptions_by_slurm_alone_count(submit, cluster):
    run = submit("started()\ntime.sleep(300)", "--num_workers=1", "--max_preemptions=1")
    for attempt in range(2):
        run.await_files(f"*.{attempt}.*", 1)
        cluster.run(["scontrol", "requeue", run.job])
    assert run.end() == ("FAILED", 75), run.lines
    assert run.lines[-1] == "tfdist: not queued again: --max_preemptions=1 is used up"


def test_failures_and_preemptions_are_counted_apart(submit):
    text = "print('attempt', attempt)\nsys.exit([75, 3, 75, 4][attempt])"
    run = submit(text, "--num_workers=2", "--max_restarts=1", "--sbatch=--comment=for the group")
    assert run.end() == ("FAILED", 4), run.lines
    assert [line for line in run.lines if "tfdist: queuing" in line] == [
        "tfdist: queuing the job again (preemption 1)",
        "tfdist: queuing the job again (restart 1 of 1)",
        "tfdist: queuing the job again (preemption 2)",
    ]
    assert "for the group tfdist_failures=1" in run.cluster.run(["scontrol", "show", "job", run.job]).stdout


def test_a_time_limit_without_a_checkpoint_ends_the_job(submit):
    run = submit("started()\ntime.sleep(300)", "--num_workers=2", "--time=1", "--pre_kill_secs=30")
    assert run.end() == ("FAILED", 143), run.lines
    assert run.lines[-1].startswith("tfdist: not queued again: the time limit is near and nothing was saved")


# Waiting.


def test_ctrl_c_while_it_waits_leaves_the_job_alone(cluster, tmp_path, submit):
    (tmp_path / "train.py").write_text(PREAMBLE + "started()\ntime.sleep(300)")
    waiting = subprocess.Popen(
        cluster.command(command("--num_workers=1", "--sbatch=--wait"), tmp_path),
        env=cluster.env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    job = waiting.stdout.readline().strip()
    Run(cluster, tmp_path, job).await_files("*.0.*", 1)
    # As a terminal does: the launcher and sbatch get it.
    for process in psutil.Process(waiting.pid).children(recursive=True):
        process.send_signal(signal.SIGINT)
    _, said = waiting.communicate(timeout=60)
    assert waiting.returncode == 130, said
    assert f"tfdist: no longer waiting; job {job} goes on, scancel {job} ends it" in said
    assert cluster.show(job)["JobState"] == "RUNNING"


# What is left, and what was killed.


def test_scancel_ends_a_job_for_good_and_leaves_nothing(submit, cluster):
    text = "started()\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\nwhile True: signal.pause()"
    run = submit(text, "--num_workers=3")
    run.await_files("*.0.*", 3)
    cluster.run(["scancel", run.job])
    assert run.end()[0] == "CANCELLED", run.lines
    assert run.left() == []
    assert cluster.show(run.job)["JobState"] == "CANCELLED"


def test_a_killed_wrapper_is_a_failure_and_its_script_ends(submit):
    text = "started()\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\nwhile True: signal.pause()"
    run = submit(text, "--num_workers=2", "--max_restarts=0")
    run.await_files("*.0.*", 2)
    scripts = [process for process in psutil.process_iter(["environ", "cmdline"]) if _is_script(process, run)]
    victim = next(each for each in scripts if json.loads(each.environ()["TF_CONFIG"])["task"]["index"] == 1)
    victim.parent().parent().kill()  # Behind the guard.
    victim.wait(20)
    state, code = run.end()
    assert (state, code) == ("FAILED", 137), run.lines
    assert "tfdist: worker:1 left no exit code: its wrapper was killed" in run.lines
    assert not any("queuing" in line for line in run.lines)


def _is_script(process, run):
    return (process.info["environ"] or {}).get("SLURM_JOB_ID") == run.job and process.info["cmdline"][-1:] == [
        "train.py"
    ] == process.info["cmdline"][1:]


def test_gpu_bind_gives_each_worker_its_own_gpu(submit):
    text = "pathlib.Path(f'{name}.gpu').write_text(os.environ.get('CUDA_VISIBLE_DEVICES', 'unset'))"
    run = submit(text, "--num_workers=4", "--tasks_per_node=2", "--gpus_per_node=2", "--sbatch=--gpu-bind=single:1")
    assert run.end() == ("COMPLETED", 0), run.lines
    found = {path.name: path.read_text() for path in run.folder.glob("*.gpu")}
    assert found == {f"worker:{number}.gpu": str(number % 2) for number in range(4)}


def test_hosts_without_workers_reserve_no_gpus_and_belong_to_the_job(submit, cluster):
    text = """
pathlib.Path(f"{name}.{attempt}.gpu").write_text(os.environ.get("CUDA_VISIBLE_DEVICES", "unset"))
started()
while attempt == 0: time.sleep(1)
pathlib.Path(f"{name}.cluster").write_text(os.environ["TF_CONFIG"])
"""
    run = submit(text, "--num_workers=4", "--num_ps=1", "--tasks_per_node=2", "--gpus_per_node=2")
    run.await_files("*.0.[0-9]*", 6)
    shown = cluster.run(["scontrol", "show", "job", run.job]).stdout
    assert "HetJobOffset=1" in shown
    assert shown.count("TresPerNode=gres:gpu:2") + shown.count("TresPerNode=gpu:2") == 1
    run.preempt()
    assert run.end() == ("COMPLETED", 0), run.lines
    assert "tfdist: queuing the job again (preemption 1)" in run.lines
    found = {path.name: path.read_text() for path in run.folder.glob("*.0.gpu")}
    assert [found[f"worker:{number}.0.gpu"] for number in range(4)] == ["0", "1", "0", "1"]
    assert {found["ps:0.0.gpu"], found["chief:0.0.gpu"]} <= {"", "unset"}
    members = json.loads((run.folder / "chief:0.cluster").read_text())["cluster"]
    hosts = [address.split(":")[0] for job in ("worker", "ps", "chief") for address in members[job]]
    assert len(set(hosts)) == 3
    assert run.left() == []


def test_a_failure_on_a_host_without_workers_ends_the_others(submit):
    text = """
signal.signal(signal.SIGTERM, lambda *_: (print("saved", flush=True), sys.exit(75)))
started()
while name != "chief:0" or len(list(pathlib.Path.cwd().glob("*.0.*"))) < 4: time.sleep(0.1)
sys.exit(5)
"""
    run = submit(text, "--num_workers=2", "--num_ps=1", "--tasks_per_node=2", "--gpus_per_node=2")
    assert run.end() == ("FAILED", 5), run.lines
    assert sum(line.endswith("saved") for line in run.lines) == 3, run.lines
