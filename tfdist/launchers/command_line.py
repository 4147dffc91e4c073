# SPDX-License-Identifier: Apache-2.0
"""Parser of a launcher's own flags, which end where the script and its arguments begin."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import importlib
import itertools
import os
import pathlib
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from absl import flags

from tfdist import _log
from tfdist.launchers.requests import LaunchError, read_file

# Modules of the commands with `main(arguments)` and `define_flags(values)`, imported only when they are used.
LAUNCHERS = {
    "local": "tfdist.launchers.local",
    "ssh": "tfdist.launchers.ssh.launcher",
    "slurm": "tfdist.launchers.slurm.launcher",
    "kubernetes": "tfdist.launchers.kubernetes.launcher",
    "tpu": "tfdist.launchers.tpu",
    "ray": "tfdist.launchers.ray",
}
COMMANDS = {
    "doctor": "tfdist.doctor.__main__",
    "profile": "tfdist.planning.profile_command",
    "advise": "tfdist.planning.advise",
    "simulate": "tfdist.planning.simulate",
    "watch": "tfdist.watching.watch",
}
# Names of one flag in several commands, ours first, then those of torchrun, horovodrun, accelerate, mpirun and Slurm.
# Names in different parts, divided by "|", count or name different things: then the value must not be copied.
_SYNONYMS = (
    "tasks_per_node ntasks_per_node nproc_per_node npernode ppn slots_per_host",
    "num_workers workers replicas num_processes nproc_per_node num_proc nproc nprocs np n completions parallelism",
    "num_workers workers nworkers ntasks num_tasks world_size",
    "workers nodes nnodes num_nodes num_machines",
    "num_ps ps servers num_servers parameter_servers",
    "hosts host H machines",
    "hostfile machinefile f",
    "devices_per_worker gpus_per_worker | gpus num_gpus",
    "gpus_per_node gpu",
    "gpus_per_worker gpus_per_task gpu | gpus_per_node | gpus num_gpus G multi_gpu use_gpu cuda accelerator",
    "env x e genv env_vars",
    "help helpfull helpshort",
    "image container_image docker_image",
    "min_workers min_np",
    "max_restarts restarts restart retries max_retries max_failures reset_limit backoff_limit",
    "task_logs log_dir logdir output_filename | redirects r",
    "directory working_dir working_directory chdir workdir wdir cwd D",
    "tf_log_level | log_level verbose v debug",
    "telemetry | timeline_filename timeline",
    "pre_kill_secs | signal",
    "refresh_secs interval n",
    "secs seconds | steps num_steps",
    "num_updates updates num_steps steps",
    "python interpreter remote_python",
    "zone tpu_zone",
    "accelerator_type type tpu_type accelerator",
    "partition p queue",  # Short options of sbatch.
    "account A",
    "qos q",
    "quiet_workers quiet q silent local_ranks_filter",
    "time t walltime max_time time_limit",
    "mem memory",
    "constraint C",
    "output o json",
    "global_batch | batch_size batch",
    "name job_name J",
    "namespace ns",
    "cpus_per_task c",
    "strategy placement_strategy",
    "runtime_env runtime_env_json",
    "spot preemptible",
    "node_selector selector",
    "version runtime_version",
    "network bandwidth",
    "step_secs step_time",
)
# Flags that take what has no flag: names that are surely meant for it, and the value of the flag.
_HANDING_ON = (
    ("gpus_per_worker", "cpu|use_cpu|no_cuda", "0"),
    ("resources_per_worker", r"(num_|use_)?gpus?(_per_\w+)?", '{{"GPU": {number}}}'),
    ("resources_per_worker", r"(num_)?cpus?(_per_\w+)?", '{{"CPU": {number}}}'),
    ("resources_per_worker", "mem(ory)?", '{{"CPU": 1, "memory": BYTES}}'),
    ("resources_per_worker", r"(\w+_)?resources(_per_task)?", '{{"CPU": 1, "GPU": 1}}'),
    ("runtime_env", r"conda|working_dir", '{{"{name}": "{value}"}}'),
    ("runtime_env", r"pip|py_modules", '{{"{name}": ["{value}"]}}'),
    # Containers are of srun's plugin pyxis.
    ("srun", r"container\w*|mpi|(cpu|mem|accel)_bind|pty|label|[lurKEX]|unbuffered|kill_on_bad_exit", "{option}"),
    ("srun", r"multi_prog|preserve_env|overlap|compress|bcast|(task_)?(pro|epi)log|resv_ports|relative", "{option}"),
    ("sbatch", r"gpus_per_task|gres|exclu\w+|[ex]|nodelist|reservation|dependency|(mem_per|mail)_\w+", "{option}"),
    ("ssh", "ssh_port", "-p{value}"),
    ("ssh", "connect_timeout", "-oConnectTimeout={value}"),
    ("ssh", "((ssh|identity|private)_)?(key|identity)(_file)?", "-i{value}"),
    ("claim", "v|volumes?|pvc|mount", "{claim}"),
    ("max_restarts", "restart(_policy)?", "{number}"),
    ("communication", "mpi|mpi_args|mca", "mpi"),
    ("communication", "gloo|tcp", "tensorflow"),
)
# Flags that hand on any other option: what of, its names, and how it is written.
_HANDING_ON_ANY = {
    "sbatch": ("an option of Slurm", ".+", "{option}"),
    "patch": ("a field of the objects", ".+", "FILE"),
    "gcloud": ("an option of gcloud", ".+", "{option}"),
    "ssh": ("an option of ssh", ".", "{option}"),
}
_MEET = "leave it out, because tasks learn from the launcher where they meet"
_NODES = "nnodes|nodes|num_nodes|num_machines|N"
_PER_HOST = r"(n?tasks|nproc)_per_node|npernode|ppn|slots(_per_host)?"
# What no flag is for: a flag by which the commands are known ("" for those that take a path), names, and the remedy.
_NO_FLAG = (
    ("", r"(log_?)?(dir(ectory)?|path|file)|logs?|profile|input", "write it without a name: {value}"),
    ("help", "version|V", "tfdist --version prints it"),
    ("patch", "context|kubeconfig|cluster|user|token|server|s|as", "KUBECONFIG or kubectl config use-context sets it"),
    ("patch", "o|output|f|filename|overrides", "--dry_run prints the manifests, --patch=FILE changes them"),
    ("patch", "rm|i|it|t|tty|stdin|attach|wait|w|watch|follow", "a line at submission has the commands of kubectl"),
    ("gcloud", "tpu(_name|_vm)?", "write --name={name}"),
    ("gcloud", r"command|(num_)?(workers?|n?nodes)|np?|nproc\w+", "SCRIPT runs on the first host, --setup on all"),
    ("patch", "limits|requests", "--cpu, --memory and --gpus_per_worker are of each pod"),
    ("patch", "task_logs|log_dir|logdir|redirects", "kubectl logs shows the output, which a line at submission names"),
    ("ssh", "user(name)?|login", "write USER@HOST in --hosts"),
    ("hosts", _PER_HOST, "write it in --hosts, as in --hosts=a:{n},b:{n} for {n} tasks on each"),
    ("ssh", "ssh_(options?|args)", "write each option by itself, such as --ssh=-p2222 --ssh=-iKEY"),
    ("ssh", r"(ssh_)?pass\w*", "a login needs a key, which ssh-copy-id HOST brings there"),
    ("refresh_secs", "port|host|bind_all", "it writes to the terminal; the page is in TensorBoard"),
    ("runtime_env", r"submission_id|no_wait|entrypoint_\w+|metadata_json", "ray job submit has it, before --"),
    ("sbatch", "wrap", "name the script behind the flags"),
    ("setup", "venv|virtualenv", "write --setup='. {value}/bin/activate', or --python={value}/bin/python"),
    ("dry_run", "strategy", "the script has it, as in train.py --tfdist_strategy=parameter_server"),
    ("sbatch", "array|a", "a job is one cluster; submit it several times"),
    ("sbatch", _NODES, "write --num_workers={n} for a worker on each, or --tasks_per_node=2 and twice the workers"),
    ("hosts", _NODES, "--hosts names them, as in --hosts=a:4,b:4 for 4 tasks on each"),
    ("env", _NODES, "write --num_workers={n} for as many workers, on all nodes together"),
    ("dry_run", _NODES, "tfdist launch ssh --hosts=a,b has several machines; here all --num_workers are on one"),
    ("dry_run", r"rdzv_\w+|(master|main_process)_\w+|(node|machine)_rank|standalone|local_addr|nics", _MEET),
    ("dry_run", "same_network|network_interfaces?", _MEET),
    ("dry_run", r"\w+_timeout(_secs|_seconds)?", "start_timeout_secs of the strategy says how long tasks wait"),
    ("dry_run", r"tpu\w*", "tfdist launch tpu starts a script on TPUs"),
    ("dry_run", "backend|nccl|communicator", "GPUs use NCCL by themselves; --communication is for CPUs"),
    ("dry_run", "gpu_ids|devices|device_ids|visible_devices", "the variable CUDA_VISIBLE_DEVICES says which GPUs"),
    ("dry_run", "(mixed_)?precision|amp|fp16|bf16|downcast_bf16", "keras.mixed_precision in the script sets it"),
    ("dry_run", r"dynamo_\w+|use_xla|xla", "model.compile(jit_compile=True) in the script sets it"),
    ("dry_run", r"(use_)?(deepspeed|fsdp|megatron|parallelism)\w*|zero_\w+", "none; see devices_per_replica"),
    ("dry_run", r"num_cpu_\w+|\w*threads|enable_cpu_affinity|bind_to", "tf.config.threading in the script sets it"),
    ("dry_run", "config(_file)?", "write --flagfile=FILE, with a flag on each line"),
    ("dry_run", "m|module", "write -m MODULE in place of the script"),
    ("dry_run", "no_python", "tasks run Python, whose script may start another program"),
    ("dry_run", "check(_build)?|diagnose", "tfdist doctor looks for what is wrong"),
    ("dry_run", r"max_np|max_workers|host_discovery_script|blacklist_\w+", "workers and hosts are fixed at the start"),
)
# Programs that users of other launchers type before the script.
_STARTERS = re.compile(r"python[\d.]*|torchrun|horovodrun|mpirun|mpiexec|srun", re.ASCII)
_LEAST_LIKENESS = 0.88
# A line of a flagfile whose value is in quotes, which a shell would take off.
_QUOTED = re.compile(r"""^(-[^=]*=)?(["'])((?:(?!\2).)*)\2$""")


class FlagError(flags.Error):
    """A flag is unknown or its value can't be parsed. The message is one line."""


def run_command(
    usage: str,
    define: Callable[[flags.FlagValues], None],
    arguments: Sequence[str],
    run: Callable[[flags.FlagValues, list[str]], int],
    takes: str = "SCRIPT [ARGUMENTS]",
) -> int:
    """Runs a command: shows its help, or does its work.

    Args:
      usage: beginning of the help.
      define: defines the flags.
      arguments: arguments after the command's name.
      run: does the work; takes the flags, and the arguments that are no flags; returns the exit code.
      takes: arguments besides flags: a script with its own, one such as "PROFILE" among the flags, or "" for none.

    Returns:
      The exit code.

    Raises:
      LaunchError: the job is invalid, or the platform's tool refuses it.
      FlagError: a flag is unknown, its value can't be parsed, or an argument is too many or missing.
    """
    has_script = takes.startswith("SCRIPT")
    values, rest = parse(define, arguments, is_anywhere=bool(takes) and not has_script)
    if values.help:
        sys.stdout.write(f"{usage}\nflags (also from a file, with --flagfile=FILE):\n{describe(values)}")
        return 0
    if has_script:
        _check_script(values, arguments, rest)
    elif len(rest) != bool(takes) or "" in rest:
        raise FlagError(f"give {f'one {takes}' if takes else 'flags only'}. Received: {' '.join(rest) or 'nothing'}")
    return run(values, rest)


def _check_script(values: flags.FlagValues, arguments: Sequence[str], rest: Sequence[str]) -> None:
    """Raises an error where no script follows the flags, with what was probably meant."""
    if not rest:
        raise LaunchError("there is no script to run; name one after the flags. Received: nothing")
    script, following, before = rest[0], [*rest[1:], "-"][0], arguments[: -len(rest)]
    if script == "-m" and following.startswith("-"):
        raise LaunchError(f"-m has no module; write -m MODULE, and flags before -m. Received: {' '.join(rest)}")
    if script == "-m" and following.endswith(".py"):
        raise LaunchError(f"-m takes a module, and this is a file; leave -m out. Received: -m {following!r}")
    if _STARTERS.fullmatch(pathlib.Path(script).name):
        raise LaunchError(f"the script is started by Python; leave {script!r} out. Received: {shlex.join(rest)}")
    if not os.path.exists(script):  # noqa: PTH110 - pathlib raises where a name is too long.
        bare, equals, value = script.lstrip("-\u2010\u2013\u2014\u2212").partition("=")
        if equals and (name := _name_in(values, f"--{bare}")[0]):
            raise FlagError(f"a flag begins with two hyphens; write {shell_flag(name, value)}. Received: {script!r}")
        if re.match(r"\S+\.py\s", script):
            raise LaunchError(f"the script is quoted with its arguments; don't quote them. Received: {script!r}")
        words = [*itertools.takewhile(lambda each: not re.search(r"^-|\.py$", each), rest)]
        typed = before[max((index for index, each in enumerate(before) if each.startswith("-")), default=0) :]
        flag, _, value = _name_in(values, "=".join(typed))
        has_script = any(each == "-m" or each.endswith(".py") for each in rest)
        if flag and flag in values and words and has_script and (form := _joined(values[flag], value, words)):
            kind = "no value after a blank" if values[flag].boolean else "a value without blanks"
            raise FlagError(f"--{flag} takes {kind}; write {form}. Received: {shlex.join([*typed, *words])}")
    if "--" not in before:
        _look_behind(values, rest)


def _joined(flag: flags.Flag, value: str, words: Sequence[str]) -> str:
    """Returns a flag whose value goes on in the words behind it; "" if these may be a script and its arguments."""
    if flag.boolean:
        return f"--{flag.name}, or --no{flag.name}" if flag.flag_type() == "bool" else shell_flag(flag.name, words[0])
    if flag.name == "hosts" and (value.endswith(",") or re.fullmatch(r"[\w.@-]+:\d+|\w+", words[0])):
        return shell_flag(flag.name, ",".join(filter(None, re.split("[, ]", " ".join([value, *words])))))
    # Of ssh, these letters take no value.
    is_option = re.fullmatch(r"(?!ssh-[46AaCfGgKkMNnqsTtVvXxYy])[a-z]+(-\w|--[\w-]+)", flag.name + value)
    return shell_flag(flag.name, value + "=" * value.startswith("--") + words[0]) if is_option else ""


DEFINE: dict[type, Callable[..., object]] = {
    bool: flags.DEFINE_boolean,
    int: flags.DEFINE_integer,
    float: flags.DEFINE_float,
    str: flags.DEFINE_string,
    list: flags.DEFINE_multi_string,
    tuple: flags.DEFINE_multi_string,
}


def define(values: flags.FlagValues, table: Mapping[str, tuple[bool | int | float | str | list[str], str]]) -> None:
    """Defines flags by a table of their defaults, whose types are those of the values, and their help."""
    for name, (default, text) in table.items():
        DEFINE[type(default)](name, default, text, flag_values=values)


JobT = TypeVar("JobT")


def define_settings(values: flags.FlagValues, *jobs: type) -> None:
    """Defines a flag for each field of these dataclasses that is a `requests.setting`."""
    for field in (each for job in jobs for each in dataclasses.fields(job) if each.metadata):
        default, text, kind, bounds = field.metadata.values()
        if isinstance(kind, tuple):
            flags.DEFINE_enum(field.name, default, kind, text, flag_values=values)
        else:
            DEFINE[kind](field.name, default, text, flag_values=values, **(bounds if kind in (int, float) else {}))


def from_settings(job: type[JobT], values: flags.FlagValues, **others: Any) -> JobT:
    """Returns a dataclass with the values of the flags of `define_settings`, and with these other values."""
    names = [field.name for field in dataclasses.fields(job) if field.metadata]  # pyright: ignore[reportArgumentType]
    found = {name: values[name].value for name in names}
    found = {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}
    return job(**{**found, **others})


def submit_or_show(values: flags.FlagValues, request: object, submit: Callable[[], int]) -> int:
    """Submits a request, or with --dry_run prints it; returns the exit code."""
    if not values.dry_run:
        return submit()
    sys.stdout.write(str(request))
    return 0


def parse(
    define: Callable[[flags.FlagValues], None], arguments: Sequence[str], is_anywhere: bool = False
) -> tuple[flags.FlagValues, list[str]]:
    """Parses a command's flags, which end where a script, or "-m MODULE", begins.

    Args:
      define: defines the flags, apart from the program's global flags, which belong to the script.
      arguments: arguments after the command's name.
      is_anywhere: True for a command without a script, whose flags may stand behind its arguments.

    Returns:
      The flags, and the arguments that are no flags: the script (or "-m" and a module) with its own arguments.

    Raises:
      FlagError: an unknown flag, or a value that can't be parsed.
    """
    values = flags.FlagValues()
    values.set_gnu_getopt(is_anywhere)  # By default, absl also parses the arguments after the script's name.
    flags.DEFINE_boolean("help", False, "print this help", short_name="h", flag_values=values)
    define(values)
    files: dict[str, str] = {}
    try:
        rest = values(["tfdist", *_underscored(values, arguments, files)])[1:]
        for name in values:
            if values[name].value != values[name].value:  # NaN is within any bounds.
                raise flags.IllegalFlagValueError(f"flag --{name}=nan: no number")
        return values, rest
    except flags.IllegalFlagValueError as error:
        raise FlagError(_illegal(str(error), values, files)) from None
    except flags.Error as error:
        raise FlagError(str(error).removeprefix("ERROR:: ").rstrip(".")) from None


def _underscored(values: flags.FlagValues, arguments: Sequence[str], files: dict[str, str]) -> list[str]:
    """Returns the arguments with flags as they are defined, such as --num_workers=2 for --num-workers=2.

    Args:
      values: the flags.
      arguments: the arguments, of which --flagfile is replaced by what the file has.
      files: gets the file of each flag that is of a file.

    Raises:
      FlagError: an unknown flag; or a flag without a value, where absl would take the script or the next flag for it.
      LaunchError: a file can't be read.
    """
    found, read = list[str](), list[str]()
    rest = [(argument, "") for argument in arguments]
    while rest:
        (argument, file), *rest = rest
        where = f" in {file}" if file else ""
        if file and not argument.startswith("-"):
            form = "write flags only, such as --dry_run, and name the script on the command line"
            raise FlagError(f"there is no flag{where}; {form}. Received: {argument!r}")
        if not argument.startswith("-") and values.is_gnu_getopt():
            found.append(argument)
            continue
        if argument in ("--", "-m") or not argument.startswith("-"):
            before = ["--"] * (argument == "-m")  # For absl, which has no such flag.
            return [*found, *before, argument, *(each for each, _ in rest)]
        name, equals, value = _name_in(values, argument)
        following = rest[0][0] if rest else "-"
        has_following = not following.startswith("-") and not following.endswith(".py")
        if name is None:
            value = value if equals else following * has_following
            raise FlagError(_unknown(argument.partition("=")[0], value, where, values))
        if not equals and (name == "flagfile" or (name in values and not values[name].boolean)):
            if not rest or following.endswith(".py") or following == "-m" or _name_in(values, following)[0]:
                example = _example(values[name]) if name in values else f"{argument}=FILE"
                raise FlagError(f"the flag {argument} has no value{where}; write {example}")
            equals, value, rest = "=", following, rest[1:]
        if name == "flagfile":
            if value in read:
                raise FlagError(f"--flagfile={value} is read twice; name it once")
            read.append(value)
            lines = enumerate(map(str.strip, read_file("--flagfile", value).splitlines()), 1)
            lines = ((number, _QUOTED.sub(r"\1\3", line)) for number, line in lines)
            rest[:0] = [(each, f"{value}, line {n}") for n, each in lines if each and not each.startswith(("#", "//"))]
            continue
        found.append(f"--{name}{equals}{value}")
        files[found[-1]] = where
    return found


def _name_in(values: flags.FlagValues, argument: str) -> tuple[str | None, str, str]:
    """Returns the defined name of the flag in an argument, "=" and the value; None if there is no such flag."""
    head, equals, value = argument.partition("=")
    name = head.lstrip("-").replace("-", "_")
    names = (name, "no" + name.removeprefix("no_") if name.startswith("no_") else name)
    for each in names if head.startswith("-") else ():
        positive = each.removeprefix("no")
        if (
            each in values
            or each == "flagfile"
            or (each != positive and positive in values and values[positive].boolean)
        ):
            return each, equals, value
    return None, equals, value


def _unknown(written: str, value: str, where: str, values: flags.FlagValues) -> str:
    """Returns the message for an unknown flag, with the flag, or the command, that was probably meant."""
    unknown, name = f"unknown flag {written}{where}", written.lstrip("-").replace("-", "_")
    if parts := re.fullmatch(r"([A-Za-z])(\d+)|(\w+) (.*)", name):  # -n2, or a line of a file without "=".
        name, value = filter(None, parts.groups())
    elif "sbatch" in values and not value and (parts := re.fullmatch(r"-([ptAJDqCG])(\S+)", written)):  # -pgpu
        name, value = parts.groups()
    if name == "n" and "namespace" in values and not value.isdecimal():
        return f"{unknown}; did you mean {shell_flag('namespace', value)}, or --num_workers?"
    is_launcher = "dry_run" in values
    of_hosts = f"{_NODES}|{_PER_HOST}" if "hosts" in values else _NODES
    if not (is_launcher and re.fullmatch(of_hosts, name)) and (meant := _meant(name, value, values)):
        is_complete = meant[2:] not in values or values[meant[2:]].boolean
        example = "" if is_complete else f" It takes a value, such as {_example(values[meant[2:]], value)}"
        return f"{unknown}; did you mean {meant}?{example}"
    for flag, names, remedy in _NO_FLAG:
        if (flag in values if flag else values.is_gnu_getopt()) and re.fullmatch(names, name):
            texts = {"value": "PATH", "name": "NAME", "n": "2"}
            return f"{unknown}; {remedy.format(**{key: shlex.quote(value or text) for key, text in texts.items()})}"
    if is_launcher and "env" not in values and re.fullmatch("e|env|x|genv|python|venv|directory|working_dir", name):
        return f"{unknown}; tasks on this machine have the Python, directory and environment of this command"
    if name.startswith("tfdist_"):
        return f"{unknown}; it is for the script: put it behind the script's name"
    hints = [
        f"for {what}, write {shell_flag(flag, _handed_on(form, name, value))}"
        for flag, (what, names, form) in _HANDING_ON_ANY.items()
        if flag in values and re.fullmatch(names, name)
    ]
    # A letter is the platform's own option: elsewhere it means something else.
    if not (hints and len(name) == 1) and (homes := _homes(name, value, is_launcher, bool(hints))):
        hints = [homes]
    hints += ["flags of the script stand behind its name; leave out those of another launcher"] * is_launcher
    return "; ".join([unknown, *hints[:1]])


def _homes(name: str, value: str, is_launcher: bool, is_exact: bool) -> str:
    """Returns which other commands have a flag; "" if none has. A launcher's are those of launchers.

    Unless `is_exact`, a launcher may have it under another name that is known, or hand it on.
    """
    found: dict[str, str] = {}
    commands = {f"launch {each}": module for each, module in LAUNCHERS.items()} | ({} if is_launcher else COMMANDS)
    for command, module in commands.items():
        values = flags.FlagValues()
        importlib.import_module(module).define_flags(values)
        if name in values or (is_launcher and not is_exact and (meant := _meant(name, value, values, likeness=1))):
            found[f"tfdist {command}"] = "" if name in values else f", as {meant}"
    if exact := [command for command, meant in found.items() if not meant]:
        *others, last = exact
        return f"{', '.join(others)} and {last} have it" if others else f"{last} has it"
    return next((f"{command} has it{meant}" for command, meant in found.items()), "")


def check_options(flag: str, options: Sequence[str]) -> None:
    """Refuses options that a flag hands on to another tool, if one is written without its dashes."""
    for option in options:
        if not option.startswith("-"):
            form = shell_flag(flag, f"--{option}")
            raise LaunchError(f"--{flag} has no dashes before its option; write {form}. Received: {option!r}")


def shell_flag(flag: str, value: str = "") -> str:
    """Returns a flag and its value, if it has one, as a shell reads them."""
    return f"--{flag}={shlex.quote(value)}" if value else f"--{flag}"


def _meant(name: str, value: str, values: flags.FlagValues, likeness: float = _LEAST_LIKENESS) -> str:
    """Returns the flag of a command, with its value, that does what a flag of another name is for; "" if none does."""
    for flag, names, form in _HANDING_ON:
        if flag in values and re.fullmatch(names, name):
            return shell_flag(flag, _handed_on(form, name, value))
    flag, is_same = _counterpart(name, values, likeness)
    if not is_same or values[flag].boolean or (values[flag].flag_type() == "int" and not value.isdecimal()):
        value = ""
    return flag and shell_flag(flag, value)


def _handed_on(form: str, name: str, value: str) -> str:
    option = f"--{name.replace('_', '-')}{value and f'={value}'}" if len(name) > 1 else f"-{name}{value}"
    number = value if value.isdecimal() else int(value.lower() not in ("false", "no", "never"))
    claim = value.replace(":/", "=/") if "/" in value else f"{value or 'NAME'}=/{value or 'DIRECTORY'}"
    return form.format(name=name, value=value, number=number, option=option, claim=claim)


def _counterpart(name: str, values: flags.FlagValues, likeness: float = _LEAST_LIKENESS) -> tuple[str, bool]:
    """Returns the flag that another name is for, and True if its value means the same; "" if none, or none so like."""
    for group in _SYNONYMS:
        parts = {each: part for part, names in enumerate(group.split("|")) for each in names.split()}
        if name in parts and (known := next((each for each in parts if each in values), "")):
            return known, parts[name] == parts[known]
    names = [each for each in values if len(each) > 1]
    # "window" for window_secs, "policy" for policies.
    longer = [each for each in names if likeness < 1 and len(name) > 2 and _singular(each).startswith(_singular(name))]
    close = longer if len(longer) == 1 else difflib.get_close_matches(name, names, 1, likeness)
    return (close[0], True) if close else ("", False)


def _singular(name: str) -> str:
    return re.sub("(ies|y|s)$", "", name)


def _illegal(text: str, values: flags.FlagValues, files: Mapping[str, str]) -> str:
    """Returns absl's message about a value as argument, value and remedy."""
    parts = re.fullmatch(r"flag --(\w+)=(.*?): (.*)", text, re.DOTALL)
    if parts is None or parts[1] not in values:
        return text
    name, value, _ = parts.groups()
    flag = values[name]
    received = f"Received: --{name}={value}{files.get(f'--{name}={value}', '')}"
    if isinstance(flag.parser, flags.EnumParser):
        return f"--{name} must be one of {', '.join(flag.parser.enum_values)}. {received}"
    if flag.boolean:
        return f"--{name} is on or off; write --{name}, or --no{name}. {received}"
    if name == "gpus_per_node" and (typed := re.fullmatch(r"(?=.*\d)[A-Za-z]\w*(?::(\d+))?", value)):
        given = f"--{name}={typed[1] or 1} --sbatch=--gpus-per-node={value}"
        return f"--{name} is a number; write {given} for a type. {received}"
    kind = re.sub("^(?=number)", "a ", re.sub("^(?=integer)", "an ", flag.parser.syntactic_help))
    return f"--{name} must be {kind}, such as {_example(flag)}. {received}"


def _example(flag: flags.Flag, number: str = "") -> str:
    """Returns a flag with a value that it takes: the number if it takes numbers, and one is given."""
    if flag.flag_type() not in ("int", "float") or not number.isdecimal():
        least = max(1, getattr(flag.parser, "lower_bound", None) or 0)
        choices = [*[least] * (flag.flag_type() in ("int", "float")), *getattr(flag.parser, "enum_values", ()), "VALUE"]
        number = str(flag.default or choices[0])
    return shell_flag(flag.name, number)


def _look_behind(values: flags.FlagValues, command: Sequence[str]) -> None:
    """Says which flags of the launcher stand behind the script, unless it names them; refuses --dry_run there."""
    script, arguments = (command[1:2], command[2:]) if command[0] == "-m" else (command[:1], command[1:])
    source = ""
    with contextlib.suppress(OSError, ValueError):
        source = pathlib.Path(command[0]).read_text(encoding="utf-8", errors="replace")
    for argument, following in itertools.pairwise([*arguments, ""]):
        if argument == "--":
            return
        name, is_short = argument.lstrip("-").partition("=")[0].replace("-", "_"), not argument.startswith("--")
        meant, is_same = _counterpart(name, values) if is_short else (name, name in values)
        pattern = rf"""["']{re.escape(name)}["']|-{re.escape(name).replace("_", "[-_]")}\b"""
        if not argument.startswith("-") or name in ("help", "h") or not is_same or re.search(pattern, source):
            continue
        behind, before = f"{argument} stands behind {script[0]}, so the script gets it", f"before {script[0]}"
        if name == "dry_run":
            raise FlagError(f"{behind}, and the job would start; put it, or -- if it is the script's own, {before}")
        # Of a module, or in an image, there is no file at hand: it may have a flag of that name.
        if source:
            _log.say(f"{behind}; for the launcher, put {shell_flag(meant, following) if is_short else 'it'} {before}")


def describe(values: flags.FlagValues) -> str:
    """Returns the flags with their defaults and help, one line each."""
    names = [name for name in values if len(name) > 1]
    shown = dict[str, str]()
    for name in names:
        flag = values[name]
        default = "" if flag.default in (None, []) else flag.default_as_str.strip("'")
        shown[name] = f"--{'[no]' * (flag.default is True)}{name}" if flag.boolean else f"--{name}={default}"
    width = max(map(len, shown.values()))
    return "".join(f"  {shown[name]:{width}}  {help_text(values[name])}\n" for name in names)


def help_text(flag: flags.Flag) -> str:
    """Returns the help of a flag on one line, without absl's sentence about lists."""
    text = " ".join(str(flag.help).split()).removesuffix("; repeat this option to specify a list of values")
    is_said = "may be repeated" in text or "once for each" in text
    return f"{text}; may be repeated" if isinstance(flag, flags.MultiFlag) and not is_said else text
