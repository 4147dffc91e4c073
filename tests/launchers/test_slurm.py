# SPDX-License-Identifier: Apache-2.0
"""The Slurm launcher: the batch script as text, and run by a Slurm that refuses what it doesn't know."""

import json
import pathlib
import re
import subprocess

import fake_slurm
import launching
import pytest

from tfdist.launchers import command_line, requests, tpu
from tfdist.launchers.shape import Shape
from tfdist.launchers.slurm import job as slurm_job
from tfdist.launchers.slurm import launcher as slurm

ROOT = pathlib.Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "launchers" / "golden"

# Plans.


def test_a_plan_as_text():
    job = slurm.SlurmJob(
        ("train.py", "--name=it's two words", "a\nb"),
        Shape(num_workers=4, num_ps=1),
        name="run1",
        directory="/shared/my project",
        tasks_per_node=2,
        cpus_per_task=8,
        gpus_per_node=2,
        max_restarts=3,
        task_logs="slurm-%j",
        env={"DATA": "a \"b\" 'c' $d\ne"},
        partition="gpu",
        time="4:00:00",
        python="python3",
        sbatch=("--gpu-bind=none", "--exclusive"),
        srun=("--container-image=me/train:1",),
        setup=("module load cuda", ". venv/bin/activate"),
    )
    assert slurm.plan(job) == (GOLDEN / "slurm.sh").read_text()


def test_what_is_planned_is_shell():
    subprocess.run(["bash", "-n", GOLDEN / "slurm.sh"], check=True, timeout=20)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"name": "two words"}, "--name is no name for a job"),
        ({"tasks_per_node": 2, "gpus_per_node": 1}, "--gpus_per_node leaves workers of a host without a GPU"),
        (
            {"shape": Shape(num_workers=17), "tasks_per_node": 17},
            "--port has to be given for more than 16 tasks on one host, such as --port=20000. Received: 17 tasks",
        ),
        ({"directory": "a\nb"}, "--directory has a character that a batch script can't hold"),
        ({"time": '1"'}, "--time has a character that a batch script can't hold"),
        ({"sbatch": ("--array=1-4",)}, "--sbatch can't change the tasks of a job"),
        ({"sbatch": ("--exclusive -n4",)}, "--sbatch can't change the tasks of a job"),
        ({"sbatch": ("exclusive",)}, "--sbatch has no dashes before its option; write --sbatch=--exclusive"),
        ({"srun": ("mpi=none",)}, "--srun has no dashes before its option; write --srun=--mpi=none"),
        ({"command": ("a.py", "\0")}, "an argument has a zero byte"),
    ],
)
def test_jobs_that_make_no_sense(options, words):
    with pytest.raises(requests.LaunchError, match=f"^{re.escape(words)}"):
        slurm.SlurmJob(**{"command": ("train.py",), **options})


# Runs.


@pytest.fixture
def launch(tmp_path):
    """Writes a script, submits it, and gives the launcher's code, the job's code, and what the tasks printed."""
    env = fake_slurm.install(tmp_path / "slurm")

    def run(text, *flags, arguments=()):
        (tmp_path / "train it.py").write_text(launching.PREAMBLE + text)
        command = launching.command("slurm", "--grace_period_secs=20", *flags, "train it.py", *arguments)
        done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=100)
        output = tmp_path / "slurm-4711.out"
        code = tmp_path / "slurm" / "code"
        lines = output.read_text().splitlines() if output.exists() else []
        left = [path.name for path in tmp_path.glob(".tfdist-*")]
        assert not left
        return done, int(code.read_text()) if code.exists() else None, lines

    return run


@pytest.mark.processes
def test_a_job_runs_every_task_and_all_arrives_unchanged(launch, tmp_path):
    odd = ["two words", 'it\'s "$HOME" `x`', "new\nline", "", "é", "--", "-m"]
    text = "print(name, json.dumps([sys.argv[1:], os.environ['ODD']]))"
    done, code, lines = launch(text, "--num_ps=1", "--tasks_per_node=2", f"--env=ODD={odd[1]}\n!", arguments=odd)
    assert (done.returncode, done.stdout, code) == (0, "4711\n", 0), lines
    rest = json.dumps([odd, odd[1] + "\n!"])
    found = [f"[{name}] {name} {rest}" for name in ("chief:0", "ps:0", "worker:0", "worker:1")]
    logs = tmp_path / "slurm-4711" / "attempt_0"
    assert {path.name: (path / "stdout.log").read_text() for path in logs.iterdir()} == {
        name.replace(":", "_"): f"{name} {rest}\n" for name in ("chief:0", "ps:0", "worker:0", "worker:1")
    }
    # The chief's wrapper has written the last line: the script has no strategy.
    assert sorted(lines)[:-1] == found
    assert sorted(lines)[-1].startswith("tfdist: no task has joined the cluster by a strategy of tfdist")


@pytest.mark.processes
def test_quiet_workers_write_only_the_last_lines_of_who_fails(launch):
    text = """
print(name, os.environ["TF_CPP_MIN_LOG_LEVEL"], flush=True)
open(name, "w").close()
if name == "worker:0":
    while True: signal.pause()
if name == "worker:1":
    while not (os.path.exists("worker:0") and os.path.exists("worker:2")): pass
    sys.exit(7)
"""
    _, code, lines = launch(text, "--num_workers=3", "--quiet_workers", "--tf_log_level=error")
    assert code == 7, lines
    expected = ["[worker:0] worker:0 2", "tfdist: the last lines of worker:1:", "tfdist:   worker:1 2"]
    assert lines[:3] == expected


@pytest.mark.processes
def test_a_failure_has_the_others_save_their_work_and_its_code_is_the_jobs(launch):
    text = """
def save(*_):
    print(name, "saved", flush=True)
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
open(name, "w").close()
while name == "worker:1" and not os.path.exists("worker:0"): pass
if name == "worker:1": sys.exit(7)
while True: signal.pause()
"""
    done, code, lines = launch(text)
    assert (done.returncode, code) == (0, 7), lines
    assert "[worker:0] worker:0 saved" in lines
    assert "tfdist: worker:1 failed first (exit code 7)" in lines


@pytest.mark.processes
def test_preempted_jobs_run_again_and_failed_ones_as_often_as_they_may(launch):
    text = """
attempt = int(os.environ["TFDIST_ATTEMPT"])
print("attempt", attempt, flush=True)
sys.exit([75, 1, 75, 0][attempt])
"""
    done, code, lines = launch(text, "--num_workers=1", "--max_restarts=1")
    assert (done.returncode, code) == (0, 0), lines
    assert [line for line in lines if "attempt" in line] == [f"[worker:0] attempt {n}" for n in range(4)]
    text = text.replace("[75, 1, 75, 0]", "[75, 1, 2, 0]")
    assert launch(text, "--num_workers=1", "--max_restarts=1")[1] == 2


# Waits until all tasks run, and has Slurm send SIGTERM to the whole job, as before a preemption.
PREEMPT = """
import pathlib, subprocess
attempt = int(os.environ["TFDIST_ATTEMPT"])
pathlib.Path(f"{name}.{attempt}").touch()
if attempt == 0 and name == "worker:0":
    while len(list(pathlib.Path.cwd().glob("*.0"))) < tasks: pass
    subprocess.Popen(["scancel", "--signal=TERM", "4711.0"], start_new_session=True)
while attempt == 0: signal.pause()
"""


@pytest.mark.processes
def test_sigterm_to_the_whole_job_is_a_preemption(launch):
    done, code, lines = launch(f"tasks = 4{PREEMPT}", "--num_ps=1")
    assert (done.returncode, code) == (0, 0), lines
    assert "tfdist: queuing the job again (preemption 1)" in lines
    assert not any("failed first" in line for line in lines)


@pytest.mark.processes
@pytest.mark.parametrize(("preempted", "expected"), [("None", 143), ("2026-01-01T00:00:00", 0)])
def test_term_near_the_time_limit_ends_a_job_unless_preempted(launch, tmp_path, preempted, expected):
    (tmp_path / "slurm" / "time_limit").write_text(f"00:01:00 PreemptTime={preempted}")
    _, code, lines = launch(f"tasks = 2{PREEMPT}")
    assert code == expected, lines
    text = "not queued again: the time limit is near and nothing was saved"
    assert any(text in line for line in lines) == bool(expected)


@pytest.mark.processes
def test_a_job_that_was_cancelled_is_not_queued_again(launch, tmp_path):
    (tmp_path / "slurm" / "job_state").write_text("CANCELLED")
    _, code, lines = launch(f"tasks = 2{PREEMPT}")
    assert code == 75, lines
    assert not any("queuing" in line for line in lines)


@pytest.mark.processes
def test_a_killed_wrapper_is_a_failure_of_its_task(launch):
    text = """
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
open(name, "w").close()
if name == "worker:1":
    while not os.path.exists("worker:0"): pass
    # The parent of its guard.
    os.kill(int(open(f"/proc/{os.getppid()}/stat").read().rpartition(")")[2].split()[1]), signal.SIGKILL)
while True: signal.pause()
"""
    _, code, lines = launch(text)
    assert code == 137, lines
    assert "tfdist: worker:1 left no exit code: its wrapper was killed" in lines


@pytest.mark.processes
def test_a_loss_that_is_seen_before_its_cause_is_no_preemption(launch):
    text = """
open(name, "w").close()
if name == "worker:0":
    while not os.path.exists("worker:1"): pass
    sys.exit(75)
while not any(os.path.exists(f"{folder}/worker_0") for folder in [os.environ["TFDIST_SLURM_EXITS"]]): pass
sys.exit(3)
"""
    _, code, lines = launch(text)
    assert code == 3, lines
    assert "tfdist: worker:1 failed first (exit code 3)" in lines


@pytest.mark.processes
def test_a_ps_that_fails_once_the_chief_is_done_decides_nothing(launch):
    text = """
done = os.environ["TFDIST_SLURM_EXITS"] + "/chief_0"
while name != "chief:0" and not os.path.exists(done): pass
sys.exit(3 if name == "ps:0" else 0)
"""
    _, code, lines = launch(text, "--num_ps=1", "--num_workers=1")
    assert code == 0, lines


@pytest.mark.processes
@pytest.mark.parametrize("fails_in", [0, 1])
def test_failures_that_squeue_does_not_tell_are_not_taken_for_none(launch, tmp_path, fails_in):
    """Else the job would be queued again for ever, and its comment be overwritten."""
    text = f"""
import pathlib
import re
if os.environ["TFDIST_ATTEMPT"] == "{fails_in}":
    pathlib.Path({str(tmp_path / "slurm" / "squeue_fails")!r}).touch()
sys.exit(3)
"""
    _, code, lines = launch(text, "--num_workers=1", "--max_restarts=2")
    assert code == 3, lines
    assert sum("queuing the job again" in line for line in lines) == fails_in
    assert any("not queued again: squeue does not say" in line for line in lines)
    comment = tmp_path / "slurm" / "comment"
    assert (comment.read_text() if comment.exists() else "") == ("tfdist_failures=1" if fails_in else "")


@pytest.mark.slow
@pytest.mark.processes
def test_preemptions_are_counted_while_squeue_fails(launch, tmp_path):
    (tmp_path / "slurm" / "squeue_fails").touch()
    _, code, lines = launch("sys.exit(75)", "--num_workers=1", "--max_restarts=1", "--max_preemptions=1")
    assert code == 75, lines
    assert lines[-1] == "tfdist: not queued again: --max_preemptions=1 is used up"
    assert sum("queuing the job again (preemption" in line for line in lines) == 2


@pytest.mark.processes
def test_sbatch_wait_has_the_code_of_the_job_and_its_warnings(launch, tmp_path):
    (tmp_path / "slurm" / "warning").touch()
    done, code, lines = launch("sys.exit(7)", "--num_workers=1", "--sbatch=--wait")
    assert (done.returncode, done.stdout, code) == (7, "4711\n", 7), lines
    assert done.stderr.count("sbatch: warning: this partition closes at noon\n") == 1


@pytest.mark.processes
def test_what_slurm_refuses_is_one_line(launch):
    done, code, _ = launch("", "--sbatch=--exclusiv")
    assert (done.returncode, code) == (1, None)
    refusal = "error: unrecognized option '--exclusiv'"
    assert done.stderr.splitlines() == ["tfdist: --cpus_per_task is Slurm's default: sbatch refuses 8 of them", refusal]


def test_without_slurm_it_says_where_to_go_and_makes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    (tmp_path / "train.py").touch()
    with pytest.raises(requests.LaunchError, match="no command sbatch on this machine's PATH; call this on a login"):
        slurm.main(["--output=new/%j.out", "train.py"])
    assert not (tmp_path / "new").exists()


def test_a_dry_run_is_the_script_unless_a_folder_is_absent(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    (tmp_path / "train.py").touch()
    for main, arguments in (
        (slurm.main, ["--directory=absent"]),
        (tpu.main, ["--dry_run", "--accelerator_type=v4-8", "--zone=a", "--copy=absent"]),
    ):
        with pytest.raises(requests.LaunchError, match=r"^--(directory|copy) does not exist; name .* 'absent'$"):
            main([*arguments, "train.py"])
    assert tpu.main(["--dry_run", "--accelerator_type=v4-8", "--zone=a", "--copy=train.py", "train.py"]) == 0
    dry = ["--dry_run", "--num_workers=3", "--grace_period_secs=3e6"]
    assert slurm.main([*dry, "--directory=/on/the/cluster", "train.py", "--x"]) == 0
    text = capsys.readouterr().out
    assert "#SBATCH --ntasks=3\n" in text and "cpus-per-task" not in text  # There is no Slurm to ask.
    assert text.endswith(" -- train.py --x\n")


@pytest.mark.parametrize(
    ("options", "cpus"),
    [
        ({}, 2),  # The default partition's node with the fewest CPUs, between three tasks.
        ({"partition": "gpu"}, 2),
        ({"partition": "gpu", "tasks_per_node": 1, "gpus_per_node": 2}, 6),
        ({"sbatch": ("-p gpu",), "tasks_per_node": 1, "gpus_per_node": 1}, 6),
        ({"tasks_per_node": 6, "partition": "gpu"}, 1),  # Two tasks for each of three cores.
        ({"shape": Shape(7), "tasks_per_node": 7}, 0),
    ],
)
def test_cpus_per_task_are_those_of_the_smallest_node(options, cpus):
    nodes = [
        "low* 6 1 (null)",
        "low* 8 1 (null)",
        "gpu 64 2 gpu:a100:4(S:0-1),shard:8",
        "gpu 6 2 (null)",
        "CLUSTER: x",
        "gpu 2+ 1 (null)",
    ]
    job = slurm.SlurmJob(("train.py",), **{"shape": Shape(6), "tasks_per_node": 3, **options})
    assert slurm.cpus_of_nodes(job, nodes) == cpus


@pytest.mark.parametrize(
    ("option", "variable", "words"),
    [
        ("--sbatch=--exclusive", "SBATCH_ACCOUNT", "tfdist: --cpus_per_task=8: the tasks of a node share its CPUs\n"),
        ("--mem=1T", "", "tfdist: --cpus_per_task is Slurm's default: sbatch refuses 8 of them\n"),
        ("--sbatch=--cpus-per-task=4", "", ""),
        ("--sbatch=-c4", "", ""),
        ("--srun=--threads-per-core=1", "", ""),
        ("--num_ps=0", "SBATCH_CORE_SPEC", ""),
        ("--num_ps=0", "SLURM_HINT", ""),
    ],
)
def test_cpus_are_left_to_slurm_where_it_gives_less(option, variable, words, tmp_path, monkeypatch, capsys):
    for name, value in {**fake_slurm.install(tmp_path / "slurm"), variable or "UNRELATED": "1"}.items():
        monkeypatch.setenv(name, value)
    job = slurm.job_from_flags(command_line.parse(slurm.define_flags, ["--num_workers=1", option])[0], ["train.py"])
    assert slurm.with_cpus(job).cpus_per_task == 8 * ("=8" in words)
    assert (said := capsys.readouterr().err).startswith(words) and bool(said) == bool(words)


def test_an_sbatch_that_is_late_is_no_refusal(monkeypatch, capsys):
    def run(command, *stdin):
        if command[0] == "sinfo":
            return "p* 8 1 (null)"
        raise requests.ToolError("sbatch did not answer within 120 s", is_late=True)

    monkeypatch.setattr(slurm.shutil, "which", str)
    monkeypatch.setattr(requests, "run_tool", run)
    assert slurm.with_cpus(slurm.SlurmJob(("train.py",))).cpus_per_task == 0
    assert capsys.readouterr().err == "tfdist: --cpus_per_task is Slurm's default: sbatch did not answer within 120 s\n"


@pytest.mark.parametrize(
    ("output", "made", "words"),
    [
        ("--output=logs/a/%j.out", "logs/a", ""),
        ("--sbatch=--output=logs/b/%j.out", "logs/b", ""),
        ("--output=%j/out", "", "--output has a folder with a %, which Slurm does not create"),
        ("--output=file/out", "", "--output has a folder that can't be created: File exists"),
        ("--task_logs=logs/c/%j", "logs/c", ""),
        ("--task_logs=file/a/%j", "", "--task_logs has a folder that can't be created: Not a directory"),
    ],
)
def test_folder_of_output_is_made_or_refused(output, made, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    job = slurm.job_from_flags(command_line.parse(slurm.define_flags, [output])[0], ["train.py"])
    if words:
        with pytest.raises(requests.LaunchError, match=re.escape(words)):
            slurm.make_output_folders(job)
    else:
        slurm.make_output_folders(job)
        assert (tmp_path / made).is_dir()


@pytest.mark.parametrize(
    ("limit", "secs"),
    [
        *(("2", 120), ("0:30", 60), ("90:01", 91 * 60), ("1:02:03", 63 * 60), ("1-2", 26 * 3600)),
        *(("1-2:03", 26 * 3600 + 180), ("1-2:03:04", 26 * 3600 + 240), (" 5 ", 300)),
        *((text, None) for text in ("UNLIMITED", "-1", "INFINITE", "0", "", "soon", "1:2:3:4")),
    ],
)
def test_time_limits_are_read_as_slurm_does(limit, secs):
    assert slurm_job.secs_of_limit(limit) == secs


@pytest.mark.parametrize(
    ("time", "extra", "env", "shown"),
    [
        ("2", (), {}, "--time=2 (120 s) with --pre_kill_secs=120"),
        ("0-00:02", (), {}, "--time=0-00:02 (120 s)"),
        ("4:00:00", ("--time=1:30",), {}, "--sbatch=--time=1:30 (120 s)"),
        ("", ("--exclusive", "-t 2"), {}, "--sbatch=-t 2 (120 s)"),
        ("4:00:00", (), {"SBATCH_TIMELIMIT": "1"}, "SBATCH_TIMELIMIT=1 (60 s)"),
    ],
)
def test_time_limit_within_pre_kill_secs_is_refused(time, extra, env, shown, monkeypatch):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(requests.LaunchError, match="--time is not longer than --pre_kill_secs") as caught:
        slurm.SlurmJob(("train.py",), time=time, sbatch=extra)
    assert shown in str(caught.value)
    slurm.SlurmJob(("train.py",), time=time, sbatch=extra, pre_kill_secs=0)
