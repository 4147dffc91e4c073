# SPDX-License-Identifier: Apache-2.0
"""Answering peers at a task's port: at which addresses, and that strangers cost no more than they are given."""

from __future__ import annotations

import contextlib
import pathlib
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist import Cluster, Task, _sockets
from tfdist.coordination import lines, rendezvous
from tfdist.launchers.supervise.processes import PortReservation

ROOT = pathlib.Path(__file__).resolve().parents[2]
TWO = Cluster({"worker": {0: "127.0.0.1:1", 1: "127.0.0.1:2"}}, Task("worker", 0))


def echo(peer: lines.Peer) -> lines.Conversation:
    line = yield b"hello\n"
    while line != b"bye":
        line = yield line + b"\n"


@contextlib.contextmanager
def serving() -> Iterator[tuple[str, int]]:
    with PortReservation(1) as reserved, lines.LineServer(_sockets.listen(reserved.ports[0]), echo):
        yield "127.0.0.1", reserved.ports[0]


def talk(address: tuple[str, int], *words: bytes) -> list[bytes]:
    with socket.create_connection(address, 30) as peer, peer.makefile("rb") as answers:
        heard = [answers.readline()]
        for each in words:
            peer.sendall(each)
            heard.append(answers.readline())
    return heard


def test_lines_are_answered_one_by_one():
    with serving() as address:
        assert talk(address, b"one\n", b"two\n") == [b"hello\n", b"one\n", b"two\n"]


def test_many_talk_at_once():
    with serving() as address, contextlib.ExitStack() as stack:
        peers = [stack.enter_context(socket.create_connection(address, 30)) for _ in range(50)]
        for peer in reversed(peers):
            peer.sendall(b"line\n")
        for peer in peers:
            with peer.makefile("rb") as answers:
                assert [answers.readline(), answers.readline()] == [b"hello\n", b"line\n"]


@pytest.mark.parametrize("words", [bytes(_sockets.LINE_BYTES + 1), b"x" * 1_000_000])
def test_a_line_without_end_is_cut_off(words: bytes):
    with serving() as address, socket.create_connection(address, 30) as peer:
        with contextlib.suppress(ConnectionError):
            peer.sendall(words)
            while peer.recv(1000):
                pass
        assert talk(address, b"one\n") == [b"hello\n", b"one\n"]


def test_who_reads_nothing_is_cut_off():
    with serving() as address, socket.create_connection(address, 30) as peer:
        with pytest.raises(ConnectionError):
            while True:
                peer.sendall(b"x" * (_sockets.LINE_BYTES - 1) + b"\n")
        assert talk(address, b"one\n") == [b"hello\n", b"one\n"]


def test_who_drips_is_cut_off_when_its_time_is_over(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lines, "PEER_SECS", 0.5)
    with serving() as address, socket.create_connection(address, 30) as dripping:
        assert dripping.recv(100) == b"hello\n"
        dripping.sendall(b"d")
        with contextlib.suppress(ConnectionError):
            assert dripping.recv(100) == b""


def test_the_oldest_gives_way_when_there_are_too_many():
    with serving() as address, contextlib.ExitStack() as stack:
        peers = [stack.enter_context(socket.create_connection(address, 30)) for _ in range(lines.MOST_PEERS + 1)]
        assert [peer.recv(100) for peer in peers] == [b"hello\n"] * len(peers)
        with contextlib.suppress(ConnectionError):
            assert peers[0].recv(100) == b""
        peers[1].sendall(b"still here\n")
        assert peers[1].recv(100) == b"still here\n"


_FEW_FILES = """
import resource, sys
from tests.coordination import test_lines
with test_lines.serving() as address:
    resource.setrlimit(resource.RLIMIT_NOFILE, (30, 30))
    print(address[1], flush=True)
    sys.stdin.readline()
"""


@pytest.mark.processes
def test_strangers_that_use_up_all_descriptors_keep_no_task_out():
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", _FEW_FILES]
    with (
        subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as program,
        contextlib.ExitStack() as stack,
    ):
        stack.callback(program.kill)
        assert program.stdout
        address = ("127.0.0.1", int(program.stdout.readline()))
        for _ in range(60):
            stack.enter_context(socket.create_connection(address, 30))
        assert talk(address, b"one\n") == [b"hello\n", b"one\n"]


def test_a_flood_from_one_host_ends_no_connection_of_another():
    with serving() as address, contextlib.ExitStack() as stack:
        oldest = stack.enter_context(socket.create_connection(address, 30, source_address=("127.0.0.2", 0)))
        for _ in range(lines.MOST_PEERS + 20):
            stranger = stack.enter_context(socket.create_connection(address, 30))
            assert stranger.recv(100) == b"hello\n"
        assert oldest.recv(100) == b"hello\n"
        oldest.sendall(b"here\n")
        assert oldest.recv(100) == b"here\n"


@pytest.mark.parametrize("secret", ["", "a secret"])
def test_all_meet_while_a_flood_goes_on(secret: str):
    over = threading.Event()
    with PortReservation(3) as reserved, ThreadPoolExecutor(4) as pool:
        addresses = {index: f"127.0.0.1:{port}" for index, port in enumerate(reserved.ports)}

        def flood() -> None:
            while not over.is_set():
                for port in reserved.ports:
                    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 30) as stranger:
                        stranger.sendall(b"tfdist flood\n" * 100)

        flooding = pool.submit(flood)
        tasks = [Cluster({"worker": addresses}, Task("worker", index)) for index in range(3)]
        meetings = [pool.submit(rendezvous.meet, each, 120, secret=secret) for each in tasks]
        try:
            assert [meeting.result() for meeting in meetings] == [None] * 3
        finally:
            over.set()
        flooding.result()


# Whatever is said.


def identity() -> Any:
    return lines.identify(b"a secret", "purpose", "worker:0")


@given(st.lists(st.binary(max_size=60) | st.sampled_from([b"tfdist met", b"tfdist a x y z"]), max_size=5))
def test_no_lines_of_a_stranger_end_a_conversation_badly(said: list[bytes]):
    met: list[str] = []
    conversation = rendezvous.converse(TWO, b"a secret", met.append)
    next(conversation)
    with contextlib.suppress(StopIteration, lines.ProtocolError):
        for line in said:
            conversation.send(line)
    assert met == []


def claim_of(greeting: bytes, secret: bytes) -> bytes:
    """What a client answers a greeting."""
    nonce = greeting.split()[-1].decode()
    proof = _sockets.proof(secret, "purpose", "client", "worker:1", "worker:0", nonce, "mine")
    return f"tfdist purpose worker:1 mine {proof}".encode()


def test_a_proof_is_of_one_side_one_client_and_one_conversation():
    first, second = identity(), identity()
    claim = claim_of(next(first), b"a secret")
    with pytest.raises(StopIteration) as ended:
        first.send(claim)
    client, answer = ended.value.value
    assert client == "worker:1" and b"a secret" not in claim + answer
    next(second)
    # A client's proof is no proof of the server's.
    assert claim.split()[-1] not in answer
    third = identity()
    other_client = claim_of(next(third), b"a secret").replace(b"worker:1", b"worker:2")
    fourth = identity()
    other_secret = claim_of(next(fourth), b"another secret")
    for conversation, wrong in ((second, claim), (third, other_client), (fourth, other_secret)):
        with pytest.raises(lines.ProtocolError, match="secret"):
            conversation.send(wrong)


# Addresses.


def test_a_port_in_use_on_another_interface_is_an_error():
    # TensorFlow's server is about to take it on all interfaces.
    with socket.create_server(("127.0.0.2", 0)) as used, pytest.raises(OSError, match="in use"):
        _sockets.listen(used.getsockname()[1])
