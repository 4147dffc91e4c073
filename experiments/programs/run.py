# SPDX-License-Identifier: Apache-2.0
"""Runs programs that others wrote under each strategy and writes docs/programs.md: `make programs SRC=...`.

SRC is a directory of checkouts: docs (tensorflow/docs), keras-io, keras (keras-team), models (tensorflow/models).
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from typing import Any

import convert
import options
import session
import table

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
KINDS = options.KINDS


def main() -> None:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--src", required=True, type=pathlib.Path)
    parser.add_argument("--programs", default="", help="names of programs, or parts of them, by commas; all by default")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--results", type=pathlib.Path, default=HERE / "published.json")
    parser.add_argument("--page", type=pathlib.Path, default=ROOT / "docs" / "programs.md")
    parser.add_argument("--timeout_secs", type=float, default=420)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--logs", type=pathlib.Path, default=pathlib.Path(tempfile.gettempdir()) / "tfdist_programs")
    flags = parser.parse_args()
    wanted = [name for name in flags.programs.split(",") if name]
    listed = options.read(HERE / "programs.txt")
    programs = [each for each in listed if not wanted or any(name in each for name in wanted)]
    found = json.loads(flags.results.read_text()) if flags.results.exists() else {}

    def run(job: tuple[str, str]) -> None:
        program, kind = job
        if kind != "one" and found.get(program, {}).get("one", {}).get("status") in ("fails", "too slow"):
            return
        outcome = _run(flags.src, program, listed[program], kind, flags.timeout_secs, flags.logs)
        found.setdefault(program, {})[kind] = outcome
        print(f"{program} {kind}: {outcome['status']} {outcome['secs']} s  {outcome['line']}", flush=True)
        flags.results.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")

    jobs = [(each, kind) for each in programs for kind in flags.kinds.split(",") if kind in listed[each].kinds]
    with concurrent.futures.ThreadPoolExecutor(flags.jobs) as pool:
        list(pool.map(run, jobs))
    flags.page.write_text(table.page(found, list(listed), KINDS))


def _run(
    src: pathlib.Path, program: str, given: options.Options, kind: str, timeout_secs: float, logs: pathlib.Path
) -> dict[str, Any]:
    """Runs one program in an empty directory of its own, and everything that it started is ended with it."""
    name = re.sub(r"\W+", "_", program)
    directory = logs / f"{name}.{kind}"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    if not (src / program).exists():
        return {"status": "missing", "line": f"SRC has no {program}", "losses": [], "secs": 0}
    try:
        changes = tomllib.loads((HERE / "keras3.toml").read_text()).get(program)
        source, modules = convert.convert(src / program, given, changes)
    except SyntaxError as error:
        return {"status": "fails", "line": f"not converted: {error}", "losses": [], "secs": 0}
    path, result = directory / "program.py", directory / "losses.json"
    for file, text in {path.name: source, **modules}.items():
        (directory / file).write_text(text)
    began = time.monotonic()
    code = _code(_command(kind, path, result), directory, src, timeout_secs, given)
    shown = json.loads(result.read_text()) if result.exists() else {"losses": []}
    line = "" if code in (0, None) else _last_line((directory / "log").read_text(errors="replace"))
    status = "works" if code == 0 else "too slow" if code is None else "fails"
    return {"status": status, "line": line, **shown, "secs": round(time.monotonic() - began)}


def _command(kind: str, path: pathlib.Path, result: pathlib.Path) -> list[str]:
    child = [str(HERE / "child.py"), kind, str(path), str(result)]
    if kind == "multi":
        return [sys.executable, "-m", "tfdist", "launch", "local", "--num_workers=2", *child]
    return [sys.executable, *child]


def _code(
    command: list[str], directory: pathlib.Path, src: pathlib.Path, timeout_secs: float, given: options.Options
) -> int | None:
    """The exit code, or None if it took too long."""
    environment = {
        "TFDIST_PROGRAMS_EXAMPLES": str(given.examples),
        "TFDIST_PROGRAMS_SCOPE": "1" * given.in_scope,
        "TFDIST_PROGRAMS_OWN": "1" * given.in_own_directories,
    }
    with session.running(command, directory, directory / "log", [HERE, src / "models"], environment) as process:
        try:
            return process.wait(timeout_secs)
        except subprocess.TimeoutExpired:
            return None


def _last_line(log: str) -> str:
    """The last line of the last Python error, without the prefix of a worker."""
    lines = [re.sub(r"^\[?\w+[: ]\d+\]?[|:]? ?", "", line) for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(\w+\.)*\w*(Error|Exception|Interrupt|Exit): \S", line)]
    return (errors or lines or [""])[-1][:300]


if __name__ == "__main__":
    main()
