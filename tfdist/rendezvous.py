# SPDX-License-Identifier: Apache-2.0
"""Waiting for tasks to come up, loudly and not for ever. No TensorFlow import."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable, Mapping

_REPORT_SECS = 10.0
_RETRY_SECS = 0.1
_CONNECT_SECS = 2.0


def wait_for_tasks(
    addresses: Mapping[str, str],
    timeout_secs: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
    problem: Callable[[str], str | None] | None = None,
) -> None:
    """Returns once every task accepts connections; says every 10 s on stderr who is missing.

    Args:
      addresses: "host:port" by task name, such as {"worker:1": "10.0.0.2:2222"}.
      timeout_secs: When to give up.
      clock: Seconds, monotonic.
      sleep: Waits for so many seconds.
      problem: Why an address does not answer, or None if it does. By default a TCP connection is tried.

    Raises:
      TimeoutError: Somebody is still missing; the message names each, with its address and what was tried.
    """
    problem = problem or why_unreachable
    start = clock()
    report_at = start + _REPORT_SECS
    missing = dict(addresses)
    while True:
        reasons = {name: reason for name, address in missing.items() if (reason := problem(address)) is not None}
        missing = {name: missing[name] for name in reasons}
        if not missing:
            return
        now = clock()
        who = ", ".join(f"{name} at {missing[name]} ({reason})" for name, reason in reasons.items())
        if now - start >= timeout_secs:
            raise TimeoutError(
                f"Gave up after {timeout_secs:g} s: no answer from {who}. Start these tasks, or correct their addresses in TF_CONFIG; "
                "start_timeout_secs sets how long to wait."
            )
        if now >= report_at:
            report_at = now + _REPORT_SECS
            print(f"tfdist: waiting for {who}, {now - start:.0f} s so far", file=sys.stderr, flush=True)
        sleep(min(_RETRY_SECS, max(0.0, start + timeout_secs - now)))


def why_unreachable(address: str) -> str | None:
    """Tries a TCP connection to "host:port"; returns why there is none, or None."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECS).close()
    except socket.gaierror as error:
        return f"the name can't be resolved: {error.strerror}"
    except OSError as error:
        return error.strerror or str(error) or type(error).__name__
    return None
