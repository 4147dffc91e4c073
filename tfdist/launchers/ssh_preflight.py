# SPDX-License-Identifier: Apache-2.0
"""Checks all hosts before any task starts, so that causes of late failures and hangs are reported at once."""

from __future__ import annotations

import concurrent.futures
import json
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tfdist.launchers import ssh_client
from tfdist.launchers.requests import LaunchError

_MAX_SKEW_SECS = 5.0
_NO_PROGRAM = (126, 127)
_SSH_FAILED = 255
_PORT_ADVICE = {
    "in use": "has port {} in use; end what holds it, or use another --port",
    "privileged": "lets this user not listen on port {}, which is privileged; use a --port from 1024",
}
_OTHER_PORT = "can't listen on port {} ({}); use another --port"


def check(
    asked: Mapping[str, Mapping[str, Any]],
    python: str,
    options: Sequence[str],
    here: Mapping[str, str],
    timeout_secs: float,
) -> list[str]:
    """Checks all hosts at once.

    Args:
      asked: for each ssh destination: `directory`, `files` in it, `ports` that must be free, number of `gpus`.
      python: the interpreter on the hosts.
      options: options of ssh.
      here: the versions that the hosts must have, by package name.
      timeout_secs: timeout for each host.

    Returns:
      Warnings, one line each.

    Raises:
      LaunchError: a host can't be used. The message has all problems of all hosts, in one line.
    """
    with concurrent.futures.ThreadPoolExecutor(min(32, len(asked)), "tfdist preflight") as pool:
        futures = {
            login: pool.submit(
                _probe, login, ssh_client.command(login, python, options, "--probe"), asked[login], timeout_secs
            )
            for login in asked
        }
        answers = {login: future.result() for login, future in futures.items()}
    wrong, warnings = [], []
    for login, answer in answers.items():
        if isinstance(answer, str):
            wrong.append(f"{login} {answer}")
            continue
        wrong += [f"{login} {problem}" for problem in problems_of(answer, asked[login], here)]
        if abs(answer["skew"]) > _MAX_SKEW_SECS:
            warnings.append(
                f"the clock of {login} is {answer['skew']:+.0f} s off from this one; set it (timedatectl, chrony)"
            )
    if wrong:
        raise LaunchError("; ".join(wrong))
    return warnings


def _probe(login: str, command: Sequence[str], asked: Mapping[str, Any], timeout_secs: float) -> dict[str, Any] | str:
    """Runs the preflight on a host; returns its answer, or the problem as the end of a sentence."""
    started = time.time()
    try:
        done = subprocess.run(
            command, input=json.dumps(dict(asked)).encode() + b"\n", capture_output=True, timeout=timeout_secs
        )
    except subprocess.TimeoutExpired:
        return f"did not answer within {timeout_secs:g} s; check that `ssh {login} true` works, or use --preflight_secs"
    said = (done.stderr.decode("utf-8", "replace").strip().splitlines() or ["it said nothing"])[-1][:200]
    if done.returncode == _SSH_FAILED:
        return f"can't be reached ({said}); check its name, and that `ssh {login} true` works without a password"
    try:
        answer = json.loads(done.stdout.decode().splitlines()[-1])
    except (ValueError, IndexError):
        if done.returncode in _NO_PROGRAM:
            return f"can't run that interpreter ({said}); name one with --python"
        if "No module named" in said:
            return f"has no tfdist for that interpreter ({said}); install it there, or name another with --python"
        return f"did not answer as expected ({said}); is another version of tfdist installed there?"
    answer["skew"] = answer["time"] - (started + time.time()) / 2
    # A difference within half of the round trip may come from unequal times of the two ways.
    answer["skew"] *= abs(answer["skew"]) > (time.time() - started) / 2
    return answer


def problems_of(answer: Mapping[str, Any], asked: Mapping[str, Any], here: Mapping[str, str]) -> list[str]:
    """Reasons for which a host can't run its tasks, from its answer and from what is asked of it."""
    found = []
    for name, version in here.items():
        there = answer["versions"].get(name)
        if there != version:
            found.append(f"has {name} {there or 'missing'} where this machine has {version}; install the same")
    found += [f"lacks {path}; copy or mount it there, or use --directory" for path in answer["missing"]]
    found += [_PORT_ADVICE.get(problem, _OTHER_PORT).format(port, problem) for port, problem in answer["taken"].items()]
    if answer["gpus"] < asked["gpus"]:
        found.append(
            f"has {answer['gpus']} GPUs where {asked['gpus']} are asked for; use fewer --gpus_per_worker or slots"
        )
    return found
