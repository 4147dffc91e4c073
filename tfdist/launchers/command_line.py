# SPDX-License-Identifier: Apache-2.0
"""Parser of a launcher's own flags, which end where the script and its arguments begin."""

from __future__ import annotations

import difflib
import pathlib
import re
import sys
from collections.abc import Callable, Mapping, Sequence

from absl import flags

from tfdist import _log
from tfdist.launchers.requests import LaunchError

# Names of one flag in several commands, ours first, then those of torchrun, horovodrun, accelerate, mpirun and Slurm.
_SYNONYMS = (
    ("tasks_per_node", "ntasks_per_node", "nproc_per_node"),
    ("num_workers", "workers", "replicas", "num_processes", "nproc_per_node", "num_proc", "nproc", "nprocs", "np", "n"),
    ("num_workers", "workers", "ntasks", "num_tasks", "world_size", "nnodes", "nodes", "num_machines", "N"),
    ("num_ps", "ps", "servers", "num_servers", "parameter_servers"),
    ("hosts", "host", "H", "machines"),
    ("hostfile", "machinefile"),
    ("gpus_per_worker", "gpus_per_task", "gpus", "num_gpus", "gpus_per_node"),
    ("gpus_per_node", "gpus_per_worker"),
    ("env", "x", "genv"),
    ("help", "helpfull", "helpshort"),
    ("image", "container_image", "docker_image"),
    ("min_workers", "min_np"),
    ("task_logs", "log_dir", "logdir", "redirects"),
    # Short options of sbatch.
    ("partition", "p"),
    ("account", "A"),
    ("qos", "q"),
    ("time", "t"),
    ("constraint", "C"),
    ("output", "o"),
    ("name", "job_name", "J"),
    ("cpus_per_task", "c"),
    ("directory", "chdir", "D"),
)
_OF_GPUS = ("gpus", "num_gpus", "gpus_per_node", "gpus_per_worker")
# Names that count something else than the flag that is meant, so that the number must not be copied.
_OTHER_UNIT = ("nnodes", "nodes", "num_machines", "N", *_OF_GPUS)
# Flags that only launchers have which supervise the tasks themselves.
_SUPERVISING = ("min_workers", "max_worker_restarts", "restart_backoff_secs", "run", "tee", "task_logs")
# Beginnings of options that srun alone has; those of containers are of its plugin pyxis.
_OF_SRUN = ("container", "mpi", "cpu_bind", "mem_bind")
_LEAST_LIKENESS = 0.88
_RENDEZVOUS = re.compile(r"rdzv_\w+|master_\w+|main_process_\w+|node_rank|machine_rank|standalone")


class FlagError(flags.Error):
    """A flag is unknown or its value can't be parsed. The message is one line."""


def run_command(
    usage: str,
    define: Callable[[flags.FlagValues], None],
    arguments: Sequence[str],
    launch: Callable[[flags.FlagValues, list[str]], int],
) -> int:
    """Runs a launcher's command: shows its help, or launches the script.

    Args:
      usage: beginning of the help.
      define: defines the flags.
      arguments: arguments after the platform's name.
      launch: launches the script; takes the flags, and the script with its arguments; returns the exit code.

    Returns:
      The exit code.

    Raises:
      LaunchError: the job is invalid, or the platform's tool refuses it.
      FlagError: a flag is unknown or its value can't be parsed.
    """
    values, command = parse(define, arguments)
    if values.help:
        sys.stdout.write(f"{usage}\nflags (also from a file, with --flagfile=FILE):\n{describe(values)}")
        return 0
    if not command:
        raise LaunchError("there is no script to run; name one after the flags. Received: nothing")
    _note_flags_of_script(values, command)
    return launch(values, command)


_DEFINE: dict[type, Callable[..., object]] = {
    bool: flags.DEFINE_boolean,
    int: flags.DEFINE_integer,
    float: flags.DEFINE_float,
    str: flags.DEFINE_string,
    list: flags.DEFINE_multi_string,
}


def define(values: flags.FlagValues, table: Mapping[str, tuple[bool | int | float | str | list[str], str]]) -> None:
    """Defines flags by a table of their defaults, whose types are those of the values, and their help."""
    for name, (default, text) in table.items():
        _DEFINE[type(default)](name, default, text, flag_values=values)


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
    try:
        arguments = values.read_flags_from_files(list(arguments), force_gnu=False)
        return values(["tfdist", *_underscored(values, arguments)])[1:]
    except flags.UnrecognizedFlagError as error:
        raise FlagError(_unknown(error.flagname, values, arguments)) from None
    except flags.IllegalFlagValueError as error:
        raise FlagError(_illegal(str(error), values)) from None
    except flags.Error as error:
        raise FlagError(str(error).removeprefix("ERROR:: ").rstrip(".")) from None


def _underscored(values: flags.FlagValues, arguments: Sequence[str]) -> list[str]:
    """Returns the arguments with the names of flags as they are defined: --num-workers=2 is --num_workers=2.

    Raises:
      FlagError: a flag has no value, where absl would take the script or the next flag for it.
    """
    found: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        if argument == "--" or not (argument.startswith("-") or values.is_gnu_getopt()):
            return [*found, argument, *rest]
        name, equals, value = _name_in(values, argument)
        if name is None:
            found.append(argument)
            continue
        found.append(f"--{name}{equals}{value}")
        if name in values and not equals and not values[name].boolean:
            following = next(rest, None)
            if following is None or following.endswith(".py") or _name_in(values, following)[0]:
                raise FlagError(f"the flag {argument} has no value; write {argument}=VALUE")
            found.append(following)
    return found


def _name_in(values: flags.FlagValues, argument: str) -> tuple[str | None, str, str]:
    """Returns the defined name of the flag in an argument, "=" and the value; None if there is no such flag."""
    head, equals, value = argument.partition("=")
    name = head.lstrip("-").replace("-", "_")
    names = (name, "no" + name.removeprefix("no_") if name.startswith("no_") else name)
    for each in names if head.startswith("-") else ():
        positive = each.removeprefix("no")
        if each in values or (each != positive and positive in values and values[positive].boolean):
            return each, equals, value
    return None, equals, value


def _unknown(name: str, values: flags.FlagValues, arguments: Sequence[str]) -> str:
    """Returns the message for an unknown flag, with the flag that was probably meant."""
    written, value = _as_written(name, arguments)
    if number := re.fullmatch(r"([A-Za-z])(\d+)", name):  # -n2
        name, value = number.groups()
    name = name.replace("-", "_")
    if _RENDEZVOUS.fullmatch(name):
        return f"unknown flag {written}; leave it away, because tasks learn from the launcher where they meet"
    if name == "n" and "namespace" in values and not value.isdecimal():
        return f"unknown flag -n; did you mean --namespace{value and f'={value}'}, or --num_workers?"
    if "resources_per_worker" in values and name in _OF_GPUS:
        return f"unknown flag {written}; write --resources_per_worker='{{\"GPU\": {value or 1}}}'"
    if meant := _counterpart(name, values):
        # Tasks of each host, where there are several hosts, are not all workers.
        is_other = name in _OTHER_UNIT or (name == "nproc_per_node" and meant == "num_workers" and "port" in values)
        if is_other or (values[meant].flag_type() == "int" and not value.isdecimal()):
            value = ""
        return f"unknown flag {written}; did you mean --{meant}{value and f'={value}'}?"
    if name in ("env", "x", "genv") and "tee" in values:
        return f"unknown flag {written}; tasks on this machine inherit the environment: set it before the command"
    if name.removeprefix("no") in _SUPERVISING:
        return f"unknown flag {written}; tfdist launch local, ssh and ray alone have it"
    if "patch" in values:
        return f"unknown flag {written}; for a field of the objects, write --patch=FILE"
    option = f"--{name.replace('_', '-')}{value and '='}" if len(name) > 1 else f"-{name}"
    if "srun" in values:
        if name.startswith(_OF_SRUN):
            return f"unknown flag {written}; for an option of srun, write --srun={option}{value}"
        return f"unknown flag {written}; for an option of Slurm, write --sbatch={option}{value}"
    if "ssh" in values and len(name) == 1:
        return f"unknown flag {written}; for an option of ssh, write --ssh={option}{value}"
    return f"unknown flag {written}"


def _as_written(name: str, arguments: Sequence[str]) -> tuple[str, str]:
    """Returns a flag as the user wrote it, and its value: that behind "=", else the next argument."""
    for index, argument in enumerate(arguments):
        head, equals, value = argument.partition("=")
        if head.startswith("-") and head.lstrip("-") == name:
            following = arguments[index + 1 : index + 2]
            following = [each for each in following if not each.startswith("-") and not each.endswith(".py")]
            return head, value if equals else "".join(following)
    return f"--{name}", ""  # Of a flagfile.


def _counterpart(name: str, values: flags.FlagValues) -> str:
    for group in _SYNONYMS:
        if name in group and (known := next((each for each in group if each in values), "")):
            return known
    names = [each for each in values if len(each) > 1]
    return "".join(difflib.get_close_matches(name, names, 1, _LEAST_LIKENESS))


def _illegal(text: str, values: flags.FlagValues) -> str:
    """Returns absl's message about a value as argument, value and remedy."""
    parts = re.fullmatch(r"flag --(\w+)=(.*?): (.*)", text, re.DOTALL)
    if parts is None or parts[1] not in values:
        return text
    name, value, _ = parts.groups()
    flag = values[name]
    received = f"Received: --{name}={value}"
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
