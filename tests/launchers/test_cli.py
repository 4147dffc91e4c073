# SPDX-License-Identifier: Apache-2.0
"""The console command answers, at once and in one line where something is wrong."""

import functools
import importlib
import pathlib
import re
import subprocess
import sys

import pytest
from absl import flags

import tfdist
from tfdist import cli
from tfdist.launchers import command_line


def test_help(capsys):
    assert cli.main(["--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: tfdist launch PLATFORM")


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"tfdist {tfdist.__version__}\n"


def test_module_is_the_command():
    done = subprocess.run([sys.executable, "-m", "tfdist", "launch", "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stdout.startswith("usage: tfdist launch PLATFORM")


def test_launch_help_lists_the_platforms(capsys):
    assert cli.main(["launch", "--help"]) == 0
    assert "\n  local " in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["launch"]])
def test_nothing_to_do_is_an_error_that_shows_the_usage(arguments, capsys):
    assert cli.main(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("usage: ")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["lunch"],
            (
                "tfdist: unknown command; use launch, doctor, profile, advise, simulate or watch "
                "(see tfdist --help). Received: 'lunch'\n"
            ),
        ),
        (
            ["launch", "slrum", "train.py"],
            "tfdist: unknown platform; there is: {platforms} (see tfdist launch --help). Received: 'slrum'\n",
        ),
        (
            ["launch", "--num_workers=2", "local"],
            (
                "tfdist: name the platform first; did you mean tfdist launch local --num_workers=2 ...? "
                "There is: {platforms} (see tfdist launch --help)\n"
            ),
        ),
        (["train.py"], "tfdist: no command is given; did you mean tfdist launch local train.py?\n"),
    ],
)
def test_what_is_unknown_is_one_line_and_code_2(arguments, line, capsys):
    assert cli.main(arguments) == 2
    assert capsys.readouterr().err == line.format(platforms=", ".join(cli.PLATFORMS))


COMMANDS = [[name] for name in cli.COMMANDS] + [["launch", name] for name in cli.PLATFORMS]


def _flags_of(command: list[str]) -> flags.FlagValues:
    module = (cli.COMMANDS | cli.LAUNCHERS)[command[-1]]
    values = flags.FlagValues()
    importlib.import_module(module).define_flags(values)
    return values


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_no_number_in_a_flag_is_one_line_with_argument_value_and_remedy(command, capsys):
    """Of each flag of each command that takes a number, and of those that take no value or one of several."""
    values = _flags_of(command)
    for name in values:
        kind = values[name].flag_type()
        if len(name) == 1 or kind not in ("int", "float", "bool", "string enum"):
            continue
        assert cli.main([*command, f"--{name}=two", "setup.py"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert re.match(
            rf"tfdist: --{name} (must be an? \S+.*, such as --{name}=\d|must be one of|takes no value;)", line
        )
        assert line.endswith(f"Received: --{name}=two (see tfdist {' '.join(command)} --help)")


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        (["--workers=2"], "--num_workers=2"),
        (["-n", "2"], "--num_workers=2"),
        (["-n2"], "--num_workers=2"),
        (["-np", "2"], "--num_workers=2"),
        (["--num-processes", "2"], "--num_workers=2"),
        (["--nproc_per_node=gpu"], "--num_workers"),
        (["--nnodes=2"], "--num_workers"),
        (["--num_wokers=2"], "--num_workers=2"),
        (["--ps=1"], "--num_ps=1"),
    ],
)
@pytest.mark.parametrize("platform", ["local", "ssh", "slurm", "kubernetes"])
def test_names_of_other_launchers_bring_ours(platform, written, meant, capsys):
    if platform == "slurm" and written[0].startswith("--nproc"):
        meant = "--tasks_per_node"
    assert cli.main(["launch", platform, *written, "setup.py"]) == 2
    name = written[0].partition("=")[0]
    expected = f"tfdist: unknown flag {name}; did you mean {meant}? (see tfdist launch {platform} --help)\n"
    assert capsys.readouterr().err == expected


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("launch local --nproc_per_node=2", "unknown flag --nproc_per_node; did you mean --num_workers=2?"),
        ("launch ssh --nproc_per_node=2", "unknown flag --nproc_per_node; did you mean --num_workers?"),
        ("launch ssh -H a:2,b", "unknown flag -H; did you mean --hosts=a:2,b?"),
        ("launch ssh -p2222", "unknown flag -p2222; for an option of ssh, write --ssh=-p2222"),
        ("launch slurm --nproc_per_node=2", "unknown flag --nproc_per_node; did you mean --tasks_per_node=2?"),
        ("launch slurm --gres gpu:2", "unknown flag --gres; for an option of Slurm, write --sbatch=--gres=gpu:2"),
        ("launch slurm --exclusive", "unknown flag --exclusive; for an option of Slurm, write --sbatch=--exclusive"),
        (
            "launch slurm --container-image=i",
            "unknown flag --container-image; for an option of srun, write --srun=--container-image=i",
        ),
        ("launch kubernetes -n mine", "unknown flag -n; did you mean --namespace=mine, or --num_workers?"),
        ("launch kubernetes -n 2", "unknown flag -n; did you mean --num_workers=2?"),
        ("launch slurm -p gpu", "unknown flag -p; did you mean --partition=gpu?"),
        ("launch slurm --gpus=8", "unknown flag --gpus; did you mean --gpus_per_node?"),
        ("launch slurm --min_workers=1", "unknown flag --min_workers; tfdist launch local, ssh and ray alone have it"),
        ("launch local --rdzv_endpoint=a:1", "unknown flag --rdzv_endpoint; leave it away, because tasks learn"),
        ("launch local --task_logs", "the flag --task_logs has no value; write --task_logs=VALUE"),
        ("launch local --num-ps --num-workers=2", "the flag --num-ps has no value; write --num-ps=VALUE"),
        ("simulate --num_workers=4", "unknown flag --num_workers; did you mean --workers=4?"),
        ("watch logs --window_sec=4", "unknown flag --window_sec; did you mean --window_secs=4?"),
        ("advise a.json --zzz=4", "unknown flag --zzz (see tfdist advise --help)"),
    ],
)
def test_wrong_flag_brings_the_one_that_does_what_was_meant(command, words, capsys):
    script = ["setup.py"] if command.startswith("launch") else []
    assert cli.main([*command.split(), *script]) == 2
    assert capsys.readouterr().err.startswith(f"tfdist: {words}")


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_flag_with_dashes_is_the_one_with_underscores(command):
    """Of each flag of each command, whose arguments may stand before the flags where there is no script."""
    is_anywhere = command[0] in ("advise", "watch", "trace")
    module = importlib.import_module((cli.COMMANDS | cli.LAUNCHERS)[command[-1]])
    defined = _flags_of(command)
    for name in [each for each in defined if len(each) > 1]:
        flag = defined[name]
        text = "7" if flag.default is None else flag.default_as_str.strip("'") or "a=b"
        text = flag.parser.enum_values[0] if isinstance(flag.parser, flags.EnumParser) else text
        dashed = f"--{name.replace('_', '-')}"
        written = [f"--no-{dashed[2:]}"] if flag.boolean else [dashed, text]
        values, rest = command_line.parse(module.define_flags, [*written, "a.json"], is_anywhere)
        assert rest == ["a.json"]
        assert values[name].present


def test_a_flag_behind_the_script_is_noted_unless_the_script_names_it(tmp_path, capsys):
    plain, own = tmp_path / "plain.py", tmp_path / "own.py"
    plain.write_text("import tfdist\nprint(tfdist.num_workers())\n")
    own.write_text("parser.add_argument('--num-workers', type=int)\n")
    dry = ["launch", "local", "--dry_run"]
    assert cli.main([*dry, str(plain), "--num_workers=2", "--epochs=3", "--help", "--", "--num_ps=1"]) == 0
    expected = (
        f"tfdist: --num_workers=2 stands behind {plain}, so the script gets it; for the launcher, put it before {plain}"
    )
    assert capsys.readouterr().err.splitlines() == [expected]
    assert cli.main([*dry, str(own), "--num_workers=2"]) == 0
    assert cli.main([*dry, str(plain), "num_workers", "-n", "2"]) == 0
    assert cli.main([*dry, "-m", "json.tool", "--num_workers=2"]) == 0
    assert capsys.readouterr().err == ""


def test_every_platform_has_a_command():
    assert all(callable(importlib.import_module(cli.LAUNCHERS[name]).main) for name in cli.PLATFORMS)


@pytest.mark.parametrize("platform", cli.PLATFORMS)
def test_every_platform_has_a_front_a_flagfile_and_a_page(platform, capsys):
    root = pathlib.Path(cli.__file__).resolve().parents[1]
    assert f'["launch", "{platform}", *sys.argv[1:]]' in (root / "launch" / f"{platform}.py").read_text()
    pages = [root / "docs" / "launching" / f"{platform}.md", root / "docs" / "launching.md"]
    page = "".join(path.read_text() for path in pages if path.exists())
    assert f"launch/{platform}.flags" in page
    flagfile = f"--flagfile={root / 'launch' / f'{platform}.flags'}"
    assert cli.main(["launch", platform, flagfile, "--dry_run", str(root / "setup.py")]) == 0
    assert capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments", [["--help"], ["launch", "--help"], *(["launch", p, "--help"] for p in cli.PLATFORMS)]
)
def test_the_command_imports_no_tensorflow(arguments):
    code = f"import sys; from tfdist import cli; cli.main({arguments}); sys.exit('tensorflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60).returncode == 0


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("Telemetry", "callbacks.Telemetry"),
        ("SignSGD", "compression.SignSGD"),
        ("rank", "worker_index"),
        ("size", "num_workers"),
        ("is_main_process", "is_chief"),
        ("BackupWorker", "BackupWorkers"),
        ("MirrorredStrategy", "MirroredStrategy"),
    ],
)
def test_a_name_that_is_not_there_brings_the_one_that_was_meant(name, meant):
    """Also those of other toolkits. Whatever is proposed exists."""
    with pytest.raises(AttributeError, match=re.escape(f"no attribute {name!r}; did you mean tfdist.{meant}?")):
        getattr(tfdist, name)
    assert functools.reduce(getattr, meant.split("."), tfdist)
