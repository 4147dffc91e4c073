# SPDX-License-Identifier: Apache-2.0
"""Parser of a launcher's own flags, which end where the script and its arguments begin."""

from __future__ import annotations

import difflib
import importlib
import pathlib
import re
import sys
from collections.abc import Callable, Mapping, Sequence

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
_SYNONYMS = (
    "tasks_per_node ntasks_per_node nproc_per_node",
    "num_workers workers replicas num_processes nproc_per_node num_proc nproc nprocs np n",
    "num_workers workers ntasks num_tasks world_size nnodes nodes num_machines N",
    "num_ps ps servers num_servers parameter_servers",
    "hosts host H machines",
    "hostfile machinefile",
    "gpus_per_worker gpus_per_task gpus num_gpus gpus_per_node",
    "gpus_per_node gpus_per_worker",
    "env x genv env_vars",
    "help helpfull helpshort",
    "image container_image docker_image",
    "min_workers min_np",
    "max_restarts restarts restart retries",
    "task_logs log_dir logdir redirects",
    "directory working_dir chdir workdir cwd D",
    "secs steps num_steps seconds",
    "partition p",  # Short options of sbatch.
    "account A",
    "qos q",
    "time t",
    "constraint C",
    "output o",
    "name job_name J",
    "cpus_per_task c",
)
# Names that count something else than the flag that is meant, so that the number must not be copied.
_OTHER_UNIT = re.compile(r"nnodes|nodes|num_machines|N|gpus|num_gpus|gpus_per_node|gpus_per_worker|(num_)?steps")
# Flags that hand on what has no flag: names that are surely meant for it, and how it is written.
_HANDING_ON = (
    ("resources_per_worker", r"(num_)?gpus(_per_\w+)?", """'{{"GPU": {number}}}'"""),
    ("resources_per_worker", r"(num_)?cpus(_per_\w+)?", """'{{"CPU": {number}}}'"""),
    ("runtime_env", r"conda|working_dir", """'{{"{name}": "{value}"}}'"""),
    ("runtime_env", r"pip|py_modules", """'{{"{name}": ["{value}"]}}'"""),
    ("srun", r"container\w*|mpi|(cpu|mem)_bind", "{option}"),  # Containers are of its plugin pyxis.
    ("sbatch", r"gres|exclusive|exclude|nodelist|reservation|dependency|mem_per_\w+|mail_\w+", "{option}"),
)
# Flags that hand on any other option: what of, its names, and how it is written.
_HANDING_ON_ANY = {
    "sbatch": ("an option of Slurm", ".+", "{option}"),
    "patch": ("a field of the objects", ".+", "FILE"),
    "gcloud": ("an option of gcloud", ".+", "{option}"),
    "ssh": ("an option of ssh", ".", "{option}"),
}
_LEAST_LIKENESS = 0.88
_RENDEZVOUS = re.compile(r"rdzv_\w+|master_\w+|main_process_\w+|node_rank|machine_rank|standalone")


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
    if has_script and not rest:
        raise LaunchError("there is no script to run; name one after the flags. Received: nothing")
    if has_script:
        _note_flags_of_script(values, rest)
    elif len(rest) != bool(takes) or "" in rest:
        raise FlagError(f"give {f'one {takes}' if takes else 'flags only'}. Received: {' '.join(rest) or 'nothing'}")
    return run(values, rest)


DEFINE: dict[type, Callable[..., object]] = {
    bool: flags.DEFINE_boolean,
    int: flags.DEFINE_integer,
    float: flags.DEFINE_float,
    str: flags.DEFINE_string,
    list: flags.DEFINE_multi_string,
}


def define(values: flags.FlagValues, table: Mapping[str, tuple[bool | int | float | str | list[str], str]]) -> None:
    """Defines flags by a table of their defaults, whose types are those of the values, and their help."""
    for name, (default, text) in table.items():
        DEFINE[type(default)](name, default, text, flag_values=values)


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
    if "-m" in arguments and not is_anywhere:
        before = list(arguments[: arguments.index("-m")])
        values, script = _parse(define, before)
        # After a script, or "--", this "-m" belongs to the script.
        if not script and "--" not in before:
            return values, list(arguments[len(before) :])
    return _parse(define, arguments, is_anywhere)


def _parse(
    define: Callable[[flags.FlagValues], None], arguments: Sequence[str], is_anywhere: bool = False
) -> tuple[flags.FlagValues, list[str]]:
    values = flags.FlagValues()
    values.set_gnu_getopt(is_anywhere)  # By default, absl also parses the arguments after the script's name.
    flags.DEFINE_boolean("help", False, "print this help", short_name="h", flag_values=values)
    define(values)
    return values, _fill(values, arguments)


def _fill(values: flags.FlagValues, arguments: Sequence[str]) -> list[str]:
    """Gives the flags their values, and returns the arguments that are no flags.

    Dashes in the name of a flag are the same as underscores.

    Raises:
      FlagError: an unknown flag, or a value that can't be parsed.
    """
    files: dict[str, str] = {}
    try:
        return values(["tfdist", *_underscored(values, arguments, files)])[1:]
    except flags.IllegalFlagValueError as error:
        raise FlagError(_illegal(str(error), values, files)) from None
    except flags.Error as error:
        raise FlagError(str(error).removeprefix("ERROR:: ").rstrip(".")) from None


def _underscored(values: flags.FlagValues, arguments: Sequence[str], files: dict[str, str]) -> list[str]:
    """Returns the arguments with flags as they are defined: --num-workers=2 is --num_workers=2.

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
        if not argument.startswith("-") and values.is_gnu_getopt():
            found.append(argument)
            continue
        if argument == "--" or not argument.startswith("-"):
            return [*found, argument, *(each for each, _ in rest)]
        name, equals, value = _name_in(values, argument)
        where = f" in {file}" if file else ""
        following = rest[0][0] if rest else "-"
        has_following = not following.startswith("-") and not following.endswith(".py")
        if name is None:
            value = value if equals else following * has_following
            raise FlagError(_unknown(argument.partition("=")[0], value, where, values))
        if not equals and (name == "flagfile" or (name in values and not values[name].boolean)):
            if not rest or following.endswith(".py") or _name_in(values, following)[0]:
                raise FlagError(f"the flag {argument} has no value{where}; write {argument}=VALUE")
            equals, value, rest = "=", following, rest[1:]
        if name == "flagfile":
            if value in read:
                raise FlagError(f"--flagfile={value} is read twice; name it once")
            read.append(value)
            lines = map(str.strip, read_file("--flagfile", value).splitlines())
            rest[:0] = [(line, value) for line in lines if line and not line.startswith(("#", "//"))]
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
    if _RENDEZVOUS.fullmatch(name):
        return f"{unknown}; leave it away, because tasks learn from the launcher where they meet"
    if name == "n" and "namespace" in values and not value.isdecimal():
        return f"{unknown}; did you mean --namespace{value and f'={value}'}, or --num_workers?"
    if meant := _meant(name, value, values):
        return f"{unknown}; did you mean {meant}?"
    is_launcher = "dry_run" in values
    if is_launcher and "python" not in values and name in ("env", "x", "genv", "python", "directory", "working_dir"):
        return f"{unknown}; tasks on this machine have the Python, directory and environment of this command"
    if name.startswith("tfdist_"):
        return f"{unknown}; it is for the script: put it behind the script's name"
    hints = [
        f"for {what}, write --{flag}={_handed_on(form, name, value)}"
        for flag, (what, names, form) in _HANDING_ON_ANY.items()
        if flag in values and re.fullmatch(names, name)
    ]
    # A letter is the platform's own option: elsewhere it means something else.
    if not (hints and len(name) == 1) and (homes := _homes(name, value, is_launcher)):
        hints = [homes]
    hints += ["flags of the script stand behind its name"] * is_launcher
    return "; ".join([unknown, *hints[:1]])


def _homes(name: str, value: str, is_launcher: bool) -> str:
    """Returns which other commands have a flag, or hand it on; "" if none does. A launcher's are those of launchers."""
    found: dict[str, str] = {}
    commands = {f"launch {each}": module for each, module in LAUNCHERS.items()} | ({} if is_launcher else COMMANDS)
    for command, module in commands.items():
        values = flags.FlagValues()
        importlib.import_module(module).define_flags(values)
        if name in values or (meant := _meant(name, value, values)):
            found[f"tfdist {command}"] = "" if name in values else f", as {meant}"
    if exact := [command for command, meant in found.items() if not meant]:
        *others, last = exact
        return f"{', '.join(others)} and {last} have it" if others else f"{last} has it"
    return next((f"{command} has it{meant}" for command, meant in found.items()), "")


def _meant(name: str, value: str, values: flags.FlagValues) -> str:
    """Returns the flag of a command, with its value, that does what a flag of another name is for; "" if none does."""
    for flag, names, form in _HANDING_ON:
        if flag in values and re.fullmatch(names, name):
            return f"--{flag}={_handed_on(form, name, value)}"
    if not (flag := _counterpart(name, values)):
        return ""
    # Tasks of each host, where there are several hosts, are not all workers.
    is_other = _OTHER_UNIT.fullmatch(name) or (name == "nproc_per_node" and flag == "num_workers" and "port" in values)
    if is_other or (values[flag].flag_type() == "int" and not value.isdecimal()):
        value = ""
    return f"--{flag}{value and f'={value}'}"


def _handed_on(form: str, name: str, value: str) -> str:
    option = f"--{name.replace('_', '-')}{value and f'={value}'}" if len(name) > 1 else f"-{name}{value}"
    return form.format(name=name, value=value, number=value or 1, option=option)


def _counterpart(name: str, values: flags.FlagValues) -> str:
    for group in map(str.split, _SYNONYMS):
        if name in group and (known := next((each for each in group if each in values), "")):
            return known
    names = [each for each in values if len(each) > 1]
    # "meet" for meet_secs, "policy" for policies.
    longer = [each for each in names if len(name) > 2 and _singular(each).startswith(_singular(name))]
    return longer[0] if len(longer) == 1 else "".join(difflib.get_close_matches(name, names, 1, _LEAST_LIKENESS))


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
        return f"--{name} takes no value; write --{name}, or --no{name}. {received}"
    kind = re.sub("^(?=number)", "a ", re.sub("^(?=integer)", "an ", flag.parser.syntactic_help))
    example = flag.default or max(1, getattr(flag.parser, "lower_bound", None) or 0)
    return f"--{name} must be {kind}, such as --{name}={example}. {received}"


def _note_flags_of_script(values: flags.FlagValues, command: Sequence[str]) -> None:
    """Says which flags of the launcher stand behind the script, which then gets them, unless the script names them."""
    script, arguments = command[:1], command[1:]
    if script == ["-m"]:
        script, arguments = arguments[:1], arguments[1:]
    source = _source(script[0]) if script else ""
    # Of a module there is no file at hand: it may have a flag of that name, so a note might be false.
    for argument in arguments if source else []:
        if argument == "--":
            return
        name = argument.lstrip("-").partition("=")[0].replace("-", "_")
        if not argument.startswith("--") or name == "help" or name not in values:
            continue
        if not re.search(rf"""["']{name}["']|--{name.replace("_", "[-_]")}\b""", source):
            _log.say(
                f"{argument} stands behind {script[0]}, so the script gets it; "
                f"for the launcher, put it before {script[0]}"
            )


def _source(script: str) -> str:
    try:
        return pathlib.Path(script).read_text(encoding="utf-8", errors="replace")
    except (OSError, ValueError):
        return ""


def describe(values: flags.FlagValues) -> str:
    """Returns the flags with their defaults and help, one line each."""
    names = [name for name in values if len(name) > 1]
    shown = {name: f"--{name}" if values[name].boolean else f"--{name}={_default(values[name])}" for name in names}
    width = max(map(len, shown.values()))
    return "".join(f"  {shown[name]:{width}}  {help_text(values[name])}\n" for name in names)


def help_text(flag: flags.Flag) -> str:
    """Returns the help of a flag on one line, without absl's sentence about lists."""
    text = " ".join(str(flag.help).split()).removesuffix("; repeat this option to specify a list of values")
    is_said = "may be repeated" in text or "once for each" in text
    return f"{text}; may be repeated" if isinstance(flag, flags.MultiFlag) and not is_said else text


def _default(flag: flags.Flag) -> str:
    return "" if flag.default in (None, []) else flag.default_as_str.strip("'")
