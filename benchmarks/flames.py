# SPDX-License-Identifier: Apache-2.0
"""Flame graphs of the process that runs Keras' loop: where the time of a step goes, one drawing for each strategy.

    make flames            all, at tiny; FLAGS="--sizes=1M --only=multi_worker/mpi"

The contenders are those of the benchmark. py-spy looks at the stacks of Python and of the compiled code beneath, of all
threads that run Python, while one segment runs. Idle threads are left out.
"""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys
from collections.abc import Sequence

import psutil
from absl import app, flags
from arena import Team

FLAGS = flags.FLAGS
HERE = pathlib.Path(__file__).resolve().parent
# Samples per second. The stacks of compiled code take py-spy tens of milliseconds each time, in which all stands still.
_RATE, _NATIVE_RATE = 100, 10
# By contender: processes of its cluster, and its parameter servers.
_CONTENDERS = {
    "mirrored/tfdist": (0, 0),
    "multi_worker/tensorflow": (2, 0),
    "multi_worker/mpi": (2, 0),
    "parameter_server/tfdist": (2, 1),
}

flags.DEFINE_list("only", list(_CONTENDERS), "What is drawn.")
flags.DEFINE_list("sizes", ["tiny"], "Models to draw it for.")
flags.DEFINE_float("secs", 8.0, "About how long each is looked at.", lower_bound=1.0)
flags.DEFINE_bool("native", True, "Show compiled code too; it takes py-spy a minute to begin.")
flags.DEFINE_string("output", str(HERE / "results" / "flames"), "Directory of the drawings.")
flags.register_validator("only", lambda names: set(names) <= set(_CONTENDERS), f"use any of {', '.join(_CONTENDERS)}")


def main(argv: Sequence[str]) -> None:
    if argv[1:]:
        raise app.UsageError(f"unexpected argument {argv[1]!r}")
    output = pathlib.Path(FLAGS.output)
    output.mkdir(parents=True, exist_ok=True)
    for contender in FLAGS.only:
        for size in FLAGS.sizes:
            path = output / f"{contender.replace('/', '_')}_{size}.svg"
            _draw(contender, size, path)
            print(path, flush=True)


def _draw(contender: str, size: str, path: pathlib.Path) -> None:
    num_workers, num_ps = _CONTENDERS[contender]
    with Team(contender, size, num_workers, num_ps) as team:
        team.wait_ready()
        # Longer than what is looked at, because py-spy needs time to begin.
        team.calibrate(FLAGS.secs * (4 if FLAGS.native else 2))
        spy = [str(pathlib.Path(sys.executable).with_name("py-spy")), "record", "--format=flamegraph"]
        spy += [f"--rate={_NATIVE_RATE if FLAGS.native else _RATE}"]
        spy += [f"--duration={FLAGS.secs:g}", f"--pid={_first_process(contender)}", f"--output={path}", "--threads"]
        with subprocess.Popen([*spy, *(["--native"] if FLAGS.native else [])], stderr=subprocess.PIPE) as process:
            team.segment()
            _, said = process.communicate(timeout=300)
        if process.returncode:
            raise RuntimeError(f"py-spy failed: {said.decode().strip()}")
    # py-spy writes its own command line there.
    path.write_text(re.sub(r'(id="title"[^>]*>)[^<]*', rf"\g<1>{contender}, {size}", path.read_text()))


def _first_process(contender: str) -> int:
    """Returns the process that runs Keras' loop: the first task of those that the team has started."""
    found = [
        (process.cmdline()[-1] if "--task=" in process.cmdline()[-1] else process.cmdline()[-2], process.pid)
        for process in psutil.Process().children(recursive=True)
        # The launcher's guard of a task has the task's command line behind its own.
        if f"--contender={contender}" in process.cmdline() and not _is_guard(process)
    ]
    leading = [pid for task, pid in sorted(found) if task.removeprefix("--task=").partition(":")[0] in ("chief", "")]
    return leading[0] if leading else sorted(found)[0][1]


def _is_guard(process: psutil.Process) -> bool:
    return any(part.endswith("supervise/guard.py") for part in process.cmdline())


if __name__ == "__main__":
    app.run(main)
