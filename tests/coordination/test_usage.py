# SPDX-License-Identifier: Apache-2.0
"""Counters of a process: bytes of TCP sockets, also of those that were closed, CPU time, memory and restarts."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable

import pytest

from tfdist.coordination.usage import Sampler, Usage, memory_bytes

linux = pytest.mark.skipif(sys.platform != "linux", reason="the counters are Linux' own")


def _connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        return client, server.accept()[0]


def _send(source: socket.socket, target: socket.socket, count: int) -> None:
    source.sendall(bytes(count))
    left = count
    while left:
        left -= len(target.recv(left))


def counts(sampler: Sampler) -> Callable[[], tuple[int, int]]:
    return lambda: (sampler.sample().bytes_sent, sampler.sample().bytes_received)


@linux
def test_bytes_of_open_and_of_closed_sockets_are_counted_once() -> None:
    first, second = _connected()
    _send(first, second, 5000)
    counter, whole = counts(Sampler()), counts(Sampler(from_now=False))
    before = whole()
    assert counter() == (0, 0)
    _send(first, second, 1000)
    _send(second, first, 200)
    assert counter() == (1200, 1200)
    for each in (first, second):
        each.close()
    for number in (1, 2):
        client, accepted = _connected()
        _send(client, accepted, 10)
        assert counter() == (1200 + 10 * number, 1200 + 10 * number)
        for each in (client, accepted):
            each.close()
    assert counter() == counter() == (1220, 1220)
    # What a socket carried after its last sample is missing.
    assert whole() == before


def test_a_sample_is_text_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFDIST_ATTEMPT", "3")
    monkeypatch.setenv("TFDIST_TASK_RESTART", "1")
    sample = Sampler().sample()
    assert Usage.from_json(sample.to_json()) == sample
    assert sample.restarts == 3
    assert sample.cpu_secs > 0
    assert 10**6 < sample.memory_bytes <= 2 * memory_bytes()


def test_a_task_that_was_started_again_adds_to_its_former_process() -> None:
    former, new = Usage(100, 200, 3.0, 50, 1.0), Usage(1, 2, 0.5, 40, 2.0)
    assert new.after(former) == Usage(101, 202, 3.5, 40, 2.0, restarts=1)
    assert Usage(0, 0, 0.0, 1, 3.0).after(new.after(former)).restarts == 2
