# SPDX-License-Identifier: Apache-2.0
"""Runs Keras' own tests on one device and under each strategy: `make test-keras SRC=...`.

SRC is a checkout of Keras, or a directory in which Keras is installed with its tests, as by default. Ends with exit
code 1 if a test that passes on one device fails under a strategy and listed.toml doesn't list it.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

import keras_outcomes

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.append(str(HERE.parent / "programs"))

import session  # noqa: E402 (found by the line above)

# The synchronous kind of parameter server, "backup", shows what the asynchronous one differs in: by --kinds alone.
KINDS = tuple(kind for kind in keras_outcomes.NAMES if kind != "backup")
FILES = (
    "keras/src/trainers/trainer_test.py",
    "keras/src/callbacks/*_test.py",
    "keras/src/optimizers/optimizer_test.py",
    "keras/src/backend/tensorflow/*distribute_test.py",
    "integration_tests/tf_distribute_training_test.py",
)
_WORKERS = {"multi": 2}
_MAX_SESSIONS = 40


def main() -> None:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--src", default="", help="a checkout of Keras; the installed Keras by default")
    parser.add_argument("--files", default="", help="parts of names of test files, by commas; all by default")
    parser.add_argument("--tests", default="", help="an expression as of pytest's -k; all tests by default")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--list", type=pathlib.Path, default=HERE / "listed.toml")
    parser.add_argument("--page", type=pathlib.Path, default=ROOT / "docs" / "keras_tests.md")
    parser.add_argument("--without_xla", action="store_true", help="take jit_compile=True for False")
    parser.add_argument("--resume", action="store_true", help="leave out tests of which --logs has an outcome")
    parser.add_argument("--timeout_secs", type=float, default=120, help="for each test")
    parser.add_argument("--logs", type=pathlib.Path, default=pathlib.Path(tempfile.gettempdir()) / "tfdist_keras_tests")
    flags = parser.parse_args()
    # Ended as by Ctrl-C, so that what was started ends too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    src = pathlib.Path(flags.src).resolve() if flags.src else _installed()
    version = _version(src)
    files = [
        path for path in _files(src) if not flags.files or any(part in str(path) for part in flags.files.split(","))
    ]
    if not files:
        sys.exit(f"--src: no tests of Keras there, or none of --files={flags.files!r}. Received: {src}")
    found = _kept(flags.logs)
    for kind in flags.kinds.split(","):
        _run(kind, src, files, flags, found)
    problems = _report(found, flags)
    if set(KINDS) <= found.keys():
        flags.page.write_text(
            keras_outcomes.page(version, {kind: found[kind] for kind in KINDS}, keras_outcomes.read(flags.list))
        )
    sys.exit(1 if problems else 0)


def _installed() -> pathlib.Path:
    spec = importlib.util.find_spec("keras")
    return pathlib.Path(spec.origin or "").resolve().parents[1] if spec else pathlib.Path()


def _version(src: pathlib.Path) -> str:
    """The version of the tests; says so if the installed Keras is of another."""
    installed, path = importlib.metadata.version("keras"), src / "keras" / "src" / "version.py"
    match = re.search(r'__version__ = "(.*)"', path.read_text()) if path.exists() else None
    version = match[1] if match else "an unknown version"
    if version == installed:
        return version
    print(f"The tests are of Keras {version}, and the installed Keras is {installed}.", flush=True)
    return f"{version} with Keras {installed} installed"


def _files(src: pathlib.Path) -> list[pathlib.Path]:
    return [path for pattern in FILES for path in sorted(src.glob(pattern))]


def _kept(logs: pathlib.Path) -> dict[str, Any]:
    """Outcomes of earlier runs, so that one kind, or one test, can be run again."""
    path = logs / "outcomes.json"
    return json.loads(path.read_text()) if path.exists() else {}


def _report(found: dict[str, Any], flags: argparse.Namespace) -> int:
    """Prints counts and problems, and returns how many tests fail that are not listed."""
    listed, problems, one = keras_outcomes.read(flags.list), 0, found.get("one", {})
    print(f"{len(keras_outcomes.passing(one))} of {len(one)} tests pass on one device")
    for kind in flags.kinds.split(","):
        if kind == "one":
            continue
        result = keras_outcomes.compare(kind, found[kind], one, listed)
        print(f"{keras_outcomes.NAMES[kind]}: {len(result.passed)} pass, {len(result.listed)} are listed")
        for test in result.failed:
            print(f"  fails: {test}: {found[kind][test]['line']}")
        for test in result.needless:
            print(f"  listed, and passes: {test}")
        if result.missing:
            print(f"  not run: {len(result.missing)} tests, such as {result.missing[0]}")
        problems += len(result.failed) + len(result.missing)
    return problems


def _run(
    kind: str, src: pathlib.Path, files: list[pathlib.Path], flags: argparse.Namespace, found: dict[str, Any]
) -> None:
    """Runs the tests; each that ends its process, or outlasts the time limit, is left out of another session."""
    results = flags.logs / kind
    shutil.rmtree(results, ignore_errors=True)
    results.mkdir(parents=True)
    outcomes: dict[str, Any] = dict(found.get(kind, {})) if flags.resume else {}
    for number in range(_MAX_SESSIONS):
        try:
            _session(kind, src, files, flags, sorted(outcomes), results, number)
        finally:
            outcomes.update(_outcomes(results, _WORKERS.get(kind, 1)))
            found.setdefault(kind, {}).update(outcomes)
            (flags.logs / "outcomes.json").write_text(json.dumps(found, indent=1))
        path = results / "collected.0.json"
        left = [test for test in json.loads(path.read_text()) if test not in outcomes] if path.exists() else []
        if not left:
            break
        partial = [outcome for outcome in _lines(results) if outcome["id"] == left[0] and "line" in outcome]
        line = next((outcome["line"] for outcome in partial if outcome["line"]), "")
        outcomes[left[0]] = {"outcome": "failed", "line": f"ended its process or took too long. {line}".strip()}
        found[kind].update(outcomes)
    print(f"{kind}: {len(keras_outcomes.passing(outcomes))} of {len(outcomes)} tests pass", flush=True)


def _lines(results: pathlib.Path) -> list[dict[str, Any]]:
    lines = [line for path in sorted(results.glob("*.jsonl")) for line in path.read_text().splitlines()]
    return [json.loads(line) for line in lines if line.endswith("}")]


def _outcomes(results: pathlib.Path, workers: int) -> dict[str, Any]:
    """Outcomes of tests that ended in all workers: the worst of each."""
    reached: dict[str, list[dict[str, Any]]] = {}
    for outcome in _lines(results):
        if outcome["outcome"] != "begun":
            reached.setdefault(outcome.pop("id"), []).append(outcome)
    worst = ("failed", "skipped", "passed")
    return {
        test: min(all_of, key=lambda outcome: worst.index(outcome["outcome"]))
        for test, all_of in reached.items()
        if len(all_of) >= workers
    }


def _session(
    kind: str,
    src: pathlib.Path,
    files: list[pathlib.Path],
    flags: argparse.Namespace,
    done: list[str],
    results: pathlib.Path,
    number: int,
) -> None:
    """Runs pytest once, and ends everything that it started."""
    for path in results.glob("*.jsonl"):
        path.unlink()
    limits = [f"--timeout={flags.timeout_secs}", "--timeout-method=thread"]
    options = ["-q", "-rN", "--tb=short", "--continue-on-collection-errors", *limits]
    options += ["-p", "under_strategy", "-p", "no:cacheprovider", "-p", "no:xdist", "--import-mode=importlib"]
    options += ["-c", os.devnull, f"--rootdir={src}", *(["-k", flags.tests] if flags.tests else [])]
    command = ["pytest", *options, *map(str, files)]
    launch = [sys.executable, "-m"]
    if kind in _WORKERS:
        launch += ["tfdist", "launch", "local", f"--num_workers={_WORKERS[kind]}", "-m"]
    settings = {"kind": kind, "results": str(results), "done": done, "xla": not flags.without_xla}
    environment = {"TFDIST_KERAS_TESTS": json.dumps(settings)}
    log = results / f"log.{number}"
    with session.running([*launch, *command], results, log, [HERE, ROOT], environment) as process:
        _wait(process, results, 2 * flags.timeout_secs)


def _wait(process: subprocess.Popen[bytes], results: pathlib.Path, timeout_secs: float) -> None:
    """Returns when the process has ended, or nothing new was recorded for `timeout_secs`."""
    size, since = -1, time.monotonic()
    while time.monotonic() - since < timeout_secs:
        try:
            process.wait(1)
            return
        except subprocess.TimeoutExpired:
            now = sum(path.stat().st_size for path in results.glob("*.jsonl"))
            size, since = (now, time.monotonic()) if now != size else (size, since)


if __name__ == "__main__":
    main()
