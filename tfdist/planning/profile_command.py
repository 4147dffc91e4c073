# SPDX-License-Identifier: Apache-2.0
"""The command `tfdist profile SCRIPT [ARGUMENTS]`."""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
import runpy
import statistics
import sys
import traceback
from typing import Any
from unittest import mock

from absl import flags

import tfdist
from tfdist import _files, _machine
from tfdist.launchers import command_line
from tfdist.launchers.environment import tf_log_level_environment
from tfdist.launchers.requests import check_command
from tfdist.planning.profile import Profile
from tfdist.policies import composition

_NAMES = ("MirroredStrategy", "MultiWorkerMirroredStrategy", "ParameterServerStrategy")


def _one_device(name: str, mirrored: Any) -> type:
    """Returns a class in place of a strategy of tfdist, which needs no cluster and trains on one device."""

    class OneDevice:
        def __new__(cls, *args: Any, policies: Any = (), **kwargs: Any) -> Any:
            import tensorflow as tf

            composition.check_policies(policies, name)
            return mirrored(["GPU:0" if tf.config.list_logical_devices("GPU") else "CPU:0"])

    OneDevice.__name__ = OneDevice.__qualname__ = name
    return OneDevice


_USAGE = """\
usage: tfdist profile [FLAGS] SCRIPT [ARGUMENTS]

Runs a training script on one device until it calls model.fit, measures its steps and gradients for a while instead, and
writes a profile for tfdist advise. The script need not be changed; what it would do after fit is not run.
"""


class _Measured(BaseException):
    """Ends the script when all is measured; no handler of exceptions in a script catches it."""


def define_flags(values: flags.FlagValues) -> None:
    """Defines the flags of `tfdist profile`."""
    flags.DEFINE_float("secs", 60.0, "seconds to measure", lower_bound=1.0, flag_values=values)
    flags.DEFINE_string("output", "profile.json", "file of the profile", short_name="o", flag_values=values)


def _profile(values: flags.FlagValues, command: list[str]) -> int:
    """Returns the exit code: 1 if the script failed or did not call `fit`."""
    check_command(command)
    is_module = command[0] == "-m"
    script = command[is_module]
    output = pathlib.Path(values.output)
    _files.check_writable(output, "--output")
    measured: list[Profile] = []
    failure = _run(command[is_module:], is_module, values.secs, measured)
    if not measured:
        _say(f"{failure or f'{script} ended without calling model.fit, so there was nothing to measure'}; no profile")
        return 130 if failure == _INTERRUPT else 1
    profile = dataclasses.replace(measured[0], script=pathlib.Path(script).name)
    _files.write(output, profile.to_json())
    rows = f", {len(profile.tables)} tables with sparse gradients" if profile.tables else ""
    noise = f"; {profile.noise_scale}" if profile.noise_scale else ""
    size, millis = f"{profile.dense_bytes / 1e6:.3g} MB of gradients", 1e3 * statistics.median_high(profile.samples)
    _say(f"{profile.batch_size} examples in {millis:.3g} ms, {size}{rows}{noise}; wrote {output}")
    if profile.busy_in_words:
        _say(f"{profile.busy_in_words}; measure again when they have ended")
    return 0


main = functools.partial(command_line.run_command, _USAGE, define_flags, run=_profile)
_INTERRUPT = "interrupted"


def _run(argv: list[str], is_module: bool, secs: float, measured: list[Profile]) -> str:
    """Runs the script; returns what went wrong in it, "" if nothing did."""
    script = argv[0]
    # One GPU, no cluster; and less of TensorFlow's log, for which this is set before the import.
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    level = tf_log_level_environment(None, os.environ)
    with _machine.environment({"TF_CONFIG": None, "CUDA_VISIBLE_DEVICES": gpu, **level}):
        from tfdist.compat.keras import fit
        from tfdist.planning import measuring

        def instead(model: Any, fit: Any, arguments: dict[str, Any]) -> None:
            measured.append(measuring.measure(model, fit, arguments, secs, lambda text: _say(f"measuring {text}")))
            raise _Measured

        replaced = {name: _one_device(name, tfdist.MirroredStrategy) for name in _NAMES}
        with (
            mock.patch.dict(vars(tfdist), replaced),
            fit.take_over_fit(instead),
            mock.patch.multiple(sys, argv=argv, path=[*sys.path]),
        ):
            try:
                if is_module:
                    sys.path.insert(0, str(pathlib.Path.cwd()))
                    runpy.run_module(script, run_name="__main__", alter_sys=True)
                else:
                    sys.path.insert(0, str(pathlib.Path(script).resolve().parent))
                    runpy.run_path(script, run_name="__main__")
            except _Measured:
                return ""
            except KeyboardInterrupt:
                return _INTERRUPT
            except SystemExit as end:
                return "" if end.code in (None, 0) else f"{script} ended with code {end.code!r} before model.fit"
            except BaseException as error:
                traceback.print_exception(error)
                return f"{script} raised {type(error).__name__}, see above, before all was measured"
    return ""


def _say(text: str) -> None:
    sys.stderr.write(f"tfdist profile: {text}\n")
    sys.stderr.flush()
