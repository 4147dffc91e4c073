# SPDX-License-Identifier: Apache-2.0
"""Console command `tfdist`. It imports no TensorFlow, so that it starts fast."""

from __future__ import annotations

import difflib
import importlib
import shlex
import sys
from collections.abc import Collection, Sequence

from absl import flags

import tfdist
from tfdist import _log
from tfdist.launchers.command_line import COMMANDS, LAUNCHERS
from tfdist.launchers.requests import LaunchError, ToolError

_USAGE_ERROR = 2
_HELP = ("-h", "-help", "--help", "help")
_USAGE = """\
usage: tfdist launch PLATFORM [FLAGS] SCRIPT [ARGUMENTS]
       tfdist doctor [FLAGS]
       tfdist profile [FLAGS] SCRIPT [ARGUMENTS]
       tfdist advise [FLAGS] PROFILE
       tfdist simulate [FLAGS]
       tfdist watch LOGDIR [FLAGS]
       tfdist --help | --version

The distribution toolkit for TensorFlow and Keras 3.

  launch    start a script as every task of a cluster (see tfdist launch --help)
  doctor    look at this machine, and at the cluster in TF_CONFIG, for what would fail
  profile   run a training script on one device, and write what advise needs
  advise    say whether more machines would help, how many, and with which strategy
  simulate  simulate training on a cluster of any size
  watch     show a run in the terminal, live: updates, and which worker costs most
"""
_LAUNCH_USAGE = """\
usage: tfdist launch PLATFORM [FLAGS] SCRIPT [ARGUMENTS]

Starts the same script as every task of a cluster, each with its own TF_CONFIG.

platforms (tfdist launch PLATFORM --help lists the flags of one):
"""
PLATFORMS = {
    "local": "processes on this machine",
    "ssh": "machines reached by ssh",
    "slurm": "a Slurm job",
    "kubernetes": "pods on Kubernetes",
    "tpu": "a TPU VM",
    "ray": "a Ray cluster",
}


_OTHER_NAMES = {
    "launch": "run start submit",
    "local": "localhost torchrun horovodrun accelerate mpirun",
    "slurm": "sbatch srun",
    "kubernetes": "k8s kube kubectl",
    "tpu": "gcloud gcp",
}


class _UsageError(ValueError):
    """Invalid command line. The message is one line."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
      argv: arguments after the command's name; this process' own arguments by default.

    Returns:
      The exit code: 2 for an invalid command line, 1 if a tool such as kubectl has refused the job.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(arguments)
    except (_UsageError, LaunchError, OSError) as error:
        _log.say(" ".join(str(error).split()))
        return 1 if isinstance(error, ToolError) else _USAGE_ERROR
    except KeyboardInterrupt:
        return 130


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in _HELP:
        return _print(_USAGE, asked=bool(arguments))
    if arguments[0] in ("-version", "--version", "-V", "version"):
        return _print(f"tfdist {tfdist.__version__}\n", asked=True)
    if arguments[0] in COMMANDS:
        return _call(COMMANDS[arguments[0]], arguments[1:], f"tfdist {arguments[0]}")
    if arguments[0] != "launch":
        raise _unknown("command", arguments[0], ("launch", *COMMANDS), "tfdist --help")
    return _launch(arguments[1:])


def _launch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in _HELP:
        platforms = "".join(f"  {name:12}{text}\n" for name, text in PLATFORMS.items())
        return _print(_LAUNCH_USAGE + platforms, asked=bool(arguments))
    platform, *rest = arguments
    if platform not in PLATFORMS:
        if platform.startswith("-") and (named := next(filter(PLATFORMS.__contains__, rest), "")):
            rest.remove(named)
            form = shlex.join(["tfdist", "launch", named, platform, *rest])
            raise _UsageError(f"the platform comes first; write {form}. Received: {platform!r} before {named!r}")
        raise _unknown("platform", platform, PLATFORMS, "tfdist launch --help")
    return _call(LAUNCHERS[platform], rest, f"tfdist launch {platform}")


def _unknown(kind: str, given: str, known: Collection[str], page: str) -> _UsageError:
    """Returns the error for an unknown command or platform, with the one that was probably meant."""
    words = {name: name for name in known} | {name: f"launch {name}" for name in PLATFORMS}
    closest = difflib.get_close_matches(given.lower(), words, 1)
    meant = [words[name] for name, others in _OTHER_NAMES.items() if given.lower() in others.split() and name in words]
    meant += [words[name] for name in closest]
    if given.endswith(".py") or (given.startswith("-") and known is PLATFORMS):
        meant = [f"launch local {shlex.quote(given)}"]
    hint = f"; did you mean tfdist {meant[0]}? There" if meant else "; there"
    return _UsageError(f"unknown {kind}{hint} is: {', '.join(known)} (see {page}). Received: {given!r}")


def _call(module: str, arguments: list[str], command: str) -> int:
    try:
        return importlib.import_module(module).main(arguments)
    except flags.Error as error:
        raise _UsageError(f"{error} (see {command} --help)") from None


def _print(text: str, asked: bool) -> int:
    (sys.stdout if asked else sys.stderr).write(text)
    return 0 if asked else _USAGE_ERROR
