# SPDX-License-Identifier: Apache-2.0
"""Strangers at the port of a pod group's leader: they keep no member out, and one that gave way comes again."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO

import pytest

from tfdist.launchers.kubernetes import pod_group
from tfdist.launchers.kubernetes.pod_group import Counts, Rules

TASKS = ["worker:0", "worker:1"]


@pytest.fixture
def leader() -> Iterator[pod_group.Leader]:
    with contextlib.closing(pod_group.Leader(TASKS, Rules(3, 100), 0, "secret")) as made:
        yield made


def member(leader: pod_group.Leader, task: str, kind: type[pod_group.Member] = pod_group.Member) -> Any:
    return contextlib.closing(kind(task, ("localhost", leader.port), "secret", Counts(), 75, lambda line: None))


def crowd(stack: contextlib.ExitStack, leader: pod_group.Leader, words: bytes = b"") -> socket.socket:
    """Strangers that say these words, and stay; returns the last."""
    for _ in range(200):
        stranger = stack.enter_context(socket.create_connection(("localhost", leader.port), 30))
        stranger.sendall(words)
    return stranger


def ends(*members: pod_group.Member) -> list[int]:
    with ThreadPoolExecutor(len(members)) as pool:
        return list(pool.map(lambda each: each.finish(0), members))


@pytest.mark.parametrize("words", [b"", b"drip", b"["])
def test_strangers_that_came_first_and_stay_keep_no_member_out(leader: pod_group.Leader, words: bytes):
    with contextlib.ExitStack() as stack:
        crowd(stack, leader, words)
        with member(leader, "worker:0") as first, member(leader, "worker:1") as second:
            assert ends(first, second) == [0, 0]


def test_a_member_that_gave_way_comes_again(leader: pod_group.Leader):
    tried = threading.Event()
    with contextlib.ExitStack() as stack:

        class Slow(pod_group.Member):
            def _greet(self, connection: socket.socket, lines: BinaryIO) -> None:
                if not tried.is_set():
                    tried.set()
                    # The last was greeted, so all before it were accepted.
                    assert crowd(stack, leader).recv(1000)
                super()._greet(connection, lines)

        with member(leader, "worker:0", Slow) as first, member(leader, "worker:1") as second:
            assert ends(first, second) == [0, 0]
        assert tried.is_set()


def test_what_is_nested_too_deeply_is_an_error_that_is_caught():
    ours, theirs = socket.socketpair()
    with ours, theirs, theirs.makefile("rb") as lines:
        ours.sendall(b"[" * 4000 + b"\n")
        with pytest.raises(ValueError, match="not a message"):
            pod_group.read_message(lines)
