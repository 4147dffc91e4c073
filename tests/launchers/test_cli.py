# SPDX-License-Identifier: Apache-2.0
"""The console command answers, at once and in one line where something is wrong."""

import functools
import importlib
import pathlib
import re
import shlex

import pytest
from absl import flags

import tfdist
from tfdist import cli
from tfdist.launchers import command_line


@pytest.mark.parametrize(
    ("argument", "text"),
    [
        ("--help", "usage: tfdist launch PLATFORM"),
        ("--version", f"tfdist {tfdist.__version__}\n"),
        ("launch --help", "\n  local "),
        ("launch local --help", "\n  --num_workers=2 "),
    ],
)
def test_help_and_version_are_printed_and_code_0(argument, text, capsys):
    assert cli.main(argument.split()) == 0
    assert text in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["launch"]])
def test_nothing_to_do_is_an_error_that_shows_the_usage(arguments, capsys):
    assert cli.main(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("usage: ")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("lunch", "command; did you mean tfdist launch? There is: launch, doctor, profile, advise, simulate, watch"),
        ("k8s", "command; did you mean tfdist launch kubernetes?"),
        ("train.py", "command; did you mean tfdist launch local train.py?"),
        ("zzz", "command; there is: launch, "),
        ("launch SSH", "platform; did you mean tfdist launch ssh?"),
        ("launch slrum", "platform; did you mean tfdist launch slurm? There is: local, ssh, slurm, kubernetes, tpu"),
        ("launch k8s", "platform; did you mean tfdist launch kubernetes?"),
        ("launch --n=2", "platform; did you mean tfdist launch local --n=2?"),
    ],
)
def test_what_is_unknown_is_one_line_and_code_2(arguments, line, capsys):
    *before, given = arguments.split()
    assert cli.main([*before, given]) == 2
    (shown,) = capsys.readouterr().err.splitlines()
    assert shown.startswith(f"tfdist: unknown {line}")
    assert shown.endswith(f" (see {' '.join(['tfdist', *before])} --help). Received: {given!r}")


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
        # No number of a launcher is negative.
        for value in ("two", *(["nan"] if kind == "float" else []), *(["-1"] if command[0] == "launch" else [])):
            assert cli.main([*command, f"--{name}={value}", "setup.py"]) == 2
            (line,) = capsys.readouterr().err.splitlines()
            assert re.match(
                rf"tfdist: --{name} (must be an? \S+.*, such as --{name}=\d|must be one of|is on or off;)", line
            )
            assert line.endswith(f"Received: --{name}={value} (see tfdist {' '.join(command)} --help)")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("launch local --workers=2", "unknown flag --workers; did you mean --num_workers=2? (see tfdist launch"),
        ("launch ssh -np 2", "unknown flag -np; did you mean --num_workers=2?"),
        ("launch local --nproc_per_node=auto", "unknown flag --nproc_per_node; did you mean --num_workers? It takes"),
        ("launch local --nproc_per_node=2", "unknown flag --nproc_per_node; did you mean --num_workers=2?"),
        ("launch ssh --nproc_per_node=2", "unknown flag --nproc_per_node; write it in --hosts, as in --hosts=a:2,b:2"),
        ("launch ssh -H a:2,b", "unknown flag -H; did you mean --hosts=a:2,b?"),
        ("launch ssh -p2222", "unknown flag -p2222; for an option of ssh, write --ssh=-p2222"),
        ("launch slurm --nproc_per_node=2", "unknown flag --nproc_per_node; did you mean --tasks_per_node=2?"),
        ("launch slurm --gres gpu:2", "unknown flag --gres; did you mean --sbatch=--gres=gpu:2?"),
        ("launch local --redirects=3", "unknown flag --redirects; did you mean --task_logs?"),
        ("launch local --no-python", "unknown flag --no-python; tasks run Python, whose script may start another"),
        ("launch local --accelerator=gpu", "unknown flag --accelerator; did you mean --gpus_per_worker?"),
        ("launch ssh --ssh-args=-p2", "unknown flag --ssh-args; write each option by itself, such as --ssh=-p2222 --"),
        ("launch ssh --password=k", "unknown flag --password; a login needs a key, which ssh-copy-id HOST brings"),
        ("launch ssh --hosts a:2 b:2", "--hosts takes a value without blanks; write --hosts=a:2,b:2. Received: --host"),
        ("launch ssh --hosts=a, b --dry_run", "--hosts takes a value without blanks; write --hosts=a,b. Received: --"),
        ("launch ssh --ssh=-p 22 --dry_run", "--ssh takes a value without blanks; write --ssh=-p22. Received: "),
        ("launch ssh --hosts=a,a", "--hosts: the host was named before; add its slots there; write --hosts=a:2. Recei"),
        ("launch ssh --hosts=a --env=TF_CONFIG=x", "--env can't replace a variable of the launcher's; leave it out."),
        ("launch tpu --env=TPU_NAME=x", "--env can't replace a variable of the launcher's; leave it out. Received: --"),
        ("launch slurm --venv=v", "unknown flag --venv; write --setup='. v/bin/activate', or --python=v/bin/python"),
        ("launch kubernetes -v data:/d", "unknown flag -v; did you mean --claim=data=/d?"),
        ("launch kubernetes --restart=Never", "unknown flag --restart; did you mean --max_restarts=0?"),
        ("launch local --strategy=ps", "unknown flag --strategy; the script has it, as in train.py --tfdist_strategy="),
        ("profile --json=a", "unknown flag --json; did you mean --output=a?"),
        ("launch tpu --tpu_name", "unknown flag --tpu_name; write --name=NAME"),
        ("launch ray --memory=16GB", 'unknown flag --memory; did you mean --resources_per_worker=\'{"CPU": 1, "mem'),
        ("launch ray --use_gpu=false", "unknown flag --use_gpu; did you mean --resources_per_worker='{\"GPU\": 0}'?"),
        ("launch slurm -q a", "unknown flag -q; did you mean --qos=a?"),
        ("launch slurm --bell=a;b", "unknown flag --bell; for an option of Slurm, write --sbatch='--bell=a;b'"),
        ("launch slurm --pty", "unknown flag --pty; did you mean --srun=--pty?"),
        ("launch local --nnodes=2", "unknown flag --nnodes; tfdist launch ssh --hosts=a,b has several machines"),
        ("launch slurm -N 2", "unknown flag -N; write --num_workers=2 for a worker on each, or --tasks_per_node=2"),
        ("launch slurm --signal=B:60", "unknown flag --signal; did you mean --pre_kill_secs?"),
        ("launch slurm --gpus-per-node=a100:4", "--gpus_per_node is a number; write --gpus_per_node=4 --sbatch=--gpu"),
        ("launch local --gres gpu:2", "unknown flag --gres; tfdist launch slurm has it, as --sbatch=--gres=gpu:2"),
        ("launch local -H a,b", "unknown flag -H; tfdist launch ssh has it, as --hosts=a,b"),
        ("launch local --partition=p", "unknown flag --partition; tfdist launch slurm has it"),
        ("launch local --tfdist_policies=x", "unknown flag --tfdist_policies; it is for the script: put it behind"),
        ("launch local --epochs=5", "unknown flag --epochs; flags of the script stand behind its name"),
        ("launch ray --num_cpus 2", "unknown flag --num_cpus; did you mean --resources_per_worker='{\"CPU\": 2}'?"),
        ("launch ray --pip=x", 'unknown flag --pip; did you mean --runtime_env=\'{"pip": ["x"]}\'?'),
        ("launch tpu --network=n", "unknown flag --network; for an option of gcloud, write --gcloud=--network=n"),
        ("launch kubernetes --context=a", "unknown flag --context; KUBECONFIG or kubectl config use-context sets it"),
        ("launch tpu --worker=all", "unknown flag --worker; SCRIPT runs on the first host, --setup on all"),
        ("launch local --gloo", "unknown flag --gloo; did you mean --communication=tensorflow?"),
        ("launch local --multi_gpu", "unknown flag --multi_gpu; did you mean --gpus_per_worker?"),
        ("launch local num-workers=2", "a flag begins with two hyphens; write --num_workers=2. Received: 'num-work"),
        ("launch local \u2013-num_workers=2", "a flag begins with two hyphens; write --num_workers=2. Received: "),
        ("launch local -m pip.py", "-m takes a module, and this is a file; leave -m out. Received: -m 'pip.py'"),
        ("launch local --telemetry logs", "--telemetry takes no value after a blank; write --telemetry=logs. Received"),
        ("launch local --chief 1", "--chief takes no value after a blank; write --chief, or --nochief. Received: --ch"),
        ("launch local --verbose", "unknown flag --verbose; did you mean --tf_log_level? It takes a value, such"),
        ("simulate --gpus=4", "unknown flag --gpus; did you mean --devices_per_worker? It takes a value, such as"),
        ("watch --nodes=3", "unknown flag --nodes (see tfdist watch --help)"),
        ("launch local --run=a", "--run is a folder in --task_logs; add --task_logs=DIR. Received: --run=a"),
        ("launch local --version", "unknown flag --version; tfdist --version prints it"),
        ("watch --logdir=logs", "unknown flag --logdir; write it without a name: logs"),
        ("launch kubernetes -n mine", "unknown flag -n; did you mean --namespace=mine, or --num_workers?"),
        ("launch slurm --gpus=8", "unknown flag --gpus; did you mean --gpus_per_node? It takes a value, such as --gpu"),
        ("launch slurm --min_workers=1", "unknown flag --min_workers; tfdist launch local, tfdist launch ssh and tfdi"),
        ("launch local --rdzv_endpoint=a:1", "unknown flag --rdzv_endpoint; leave it out, because tasks learn"),
        ("launch local --task_logs", "the flag --task_logs has no value; write --task_logs=VALUE"),
        ("simulate --num_workers=4", "unknown flag --num_workers; did you mean --workers=4?"),
        ("simulate --policy=A(b=1)", "unknown flag --policy; did you mean --policies='A(b=1)'?"),
        ("doctor --time", "unknown flag --time; did you mean --timeout_secs?"),
        ("doctor --hosts=a", "unknown flag --hosts; tfdist launch ssh has it"),
        ("watch logs --window_sec=4", "unknown flag --window_sec; did you mean --window_secs=4?"),
        ("advise a.json --zzz=4", "unknown flag --zzz (see tfdist advise --help)"),
    ],
)
def test_wrong_flag_brings_the_one_that_does_what_was_meant(command, words, capsys):
    script = ["setup.py"] if command.startswith("launch") else []
    assert cli.main([*command.split(), *script]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"tfdist: {words}")
    known = _flags_of(command.split()[:2] if script else command.split()[:1])
    for suggested in re.findall(r"did you mean (--\S+)\?|such as (--\S+) \(see", err):
        (flag,) = shlex.split("".join(suggested))
        assert flag[2:].partition("=")[0] in known


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("--nope=1", "unknown flag --nope in own.flags, line 1;"),
        ("#\n\n--num_workers 2", "unknown flag --num_workers 2 in own.flags, line 3; did you mean --num_workers=2?"),
        ("--num-workers=x", "--num_workers must be a positive integer, such as --num_workers=2. Received: --num_work"),
        ("--task_logs", "the flag --task_logs has no value in own.flags, line 1; write --task_logs=VALUE"),
        ("--chief\ntrain.py", "there is no flag in own.flags, line 2; write flags only, such as --dry_run, and name"),
        ("num_workers=2", "there is no flag in own.flags, line 1;"),
        ("-m train", "unknown flag -m train in own.flags, line 1; write -m MODULE in place of the script"),
        ("--flagfile=own.flags", "--flagfile=own.flags is read twice; name it once"),
        ("--flagfile=no.flags", "--flagfile can't be read: No such file or directory; name a file that exists"),
    ],
)
def test_wrong_line_of_a_flagfile_names_the_file(text, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("own.flags").write_text(text)
    assert cli.main(["launch", "local", "--flagfile=own.flags", "setup.py"]) == 2
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


def test_quotes_around_a_value_of_a_flagfile_are_taken_off(tmp_path):
    path = tmp_path / "own.flags"
    path.write_text("""--setup="module load cuda"\n--setup='a "b"'\n--setup="a" && "b"\n"--name=run 1"\n""")
    values, _ = command_line.parse(importlib.import_module(cli.LAUNCHERS["slurm"]).define_flags, [f"--flagfile={path}"])
    assert values.setup == ["module load cuda", 'a "b"', '"a" && "b"'] and values.name == "run 1"


@pytest.mark.parametrize("platform", ["slurm", "tpu --zone=z --accelerator_type=v4-8", "kubernetes --image=i"])
def test_interpreter_with_arguments_is_refused(platform, capsys):
    assert cli.main(["launch", *platform.split(), "--dry_run", "--python=python3 -u", "setup.py"]) == 2
    assert capsys.readouterr().err.startswith("tfdist: --python is a program without arguments; ")


def test_script_that_is_quoted_with_its_arguments_is_refused(capsys):
    assert cli.main(["launch", "local", "train.py --lr=1"]) == 2
    assert capsys.readouterr().err.startswith("tfdist: the script is quoted with its arguments; don't quote them.")


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
    assert cli.main([*dry, str(plain), "num_workers", "-lr", "2"]) == 0
    assert cli.main([*dry, "--", str(plain), "--dry_run"]) == 0
    assert cli.main([*dry, "-m", "json.tool", "--num_workers=2"]) == 0
    assert capsys.readouterr().err == ""
    assert cli.main([*dry, str(plain), "-np", "3"]) == 0
    assert f"put --num_workers=3 before {plain}" in capsys.readouterr().err


@pytest.mark.parametrize("platform", cli.PLATFORMS)
def test_dry_run_behind_the_script_is_refused(platform, capsys):
    assert cli.main(["launch", platform, "train.py", "--dry-run"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("tfdist: --dry-run stands behind train.py") and err.count("\n") == 1


@pytest.mark.parametrize("platform", cli.PLATFORMS)
def test_every_platform_has_a_front_a_flagfile_and_a_page(platform, capsys):
    root = pathlib.Path(cli.__file__).resolve().parents[1]
    assert f'["launch", "{platform}", *sys.argv[1:]]' in (root / "launch" / f"{platform}.py").read_text()
    pages = [root / "docs" / "launching" / f"{platform}.md", root / "docs" / "launching.md"]
    page = "".join(path.read_text() for path in pages if path.exists())
    assert f"launch/{platform}.flags" in page
    flagfile = f"--flagfile={root / 'launch' / f'{platform}.flags'}"
    assert cli.main(["launch", platform, flagfile, "--dry_run", str(root / "setup.py")]) == 0
    out = capsys.readouterr().out
    assert out and ('# Ray at auto: placement group PACK of worker:0 {"CPU": 1}, ' in out) == (platform == "ray")


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
