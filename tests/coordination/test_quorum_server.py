# SPDX-License-Identifier: Apache-2.0
"""Quorum: all workers get the same verdicts, only clients with the secret are accepted, and losses are reported."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tfdist
from tfdist import _sockets
from tfdist.coordination import lines, quorum
from tfdist.coordination.quorum import Act, Kind, QuorumClient, QuorumServer, Verdict, WorkerReport, pack, unpack
from tfdist.policies import Outcome

SECRET = b"the secret of this job"


class Job:
    """A quorum server and its clients, in one process."""

    def __init__(self, joined: int, spares: int) -> None:
        # Those who have not joined yet do so in the test.
        num_workers = joined or 2
        self.lines: list[str] = []
        self.said = threading.Semaphore(0)
        self.names = [f"worker:{index}" for index in range(num_workers)]
        policy = tfdist.BackupWorkers(spares=spares)
        policy.begin(num_workers, "test")
        self.server = QuorumServer(policy, self.names, SECRET, say=self._say)
        self.server.start()
        self.address = "127.0.0.1", self.server.port
        self.clients = [self.join(index) for index in range(joined)]

    def _say(self, line: str) -> None:
        self.lines.append(line)
        self.said.release()

    def join(self, worker: int, secret: bytes = SECRET, **options: Any) -> QuorumClient:
        return QuorumClient(self.address, worker, self.names, secret, **options)

    def contribute(self, worker: int, step: int, number: int = 1, examples: int = 4) -> None:
        self.clients[worker].report(Act.WANTED, number, step)
        self.clients[worker].report(Act.STARTED, number, step)
        self.clients[worker].report(Act.ARRIVED, number, step, examples, 0.01)

    def verdicts(self, step: int, number: int = 1) -> list[Verdict | None]:
        return [client.wait(number, step) for client in self.clients]

    def assert_updates_are_made(self) -> None:
        for worker in range(2):
            self.contribute(worker, 0)
        assert None not in self.verdicts(0)


@contextlib.contextmanager
def job(num_workers: int, spares: int) -> Iterator[Job]:
    running = Job(num_workers, spares)
    try:
        yield running
    finally:
        for client in running.clients:
            client.close()
        running.server.close()


COUNTS = st.integers(0, 2**64)
SECS = st.floats(0, 1e9)
WORKERS = st.lists(st.integers(0, 999), max_size=50).map(tuple)


@given(
    st.builds(WorkerReport, st.sampled_from(Act), COUNTS, COUNTS, COUNTS, SECS, SECS)
    | st.builds(Verdict, st.sampled_from(Kind), COUNTS, WORKERS, COUNTS, WORKERS, SECS, SECS)
)
@settings(max_examples=50)
def test_messages_come_back_as_they_were(message: WorkerReport | Verdict):
    assert unpack(type(message), pack(message)) == message


@pytest.mark.parametrize("line", [b"", b"\xff", b"no JSON", b"7", b"[1]", b"[1, 2, 3, 4, 5, 6, 7, 8]", b"[" * 9999])
def test_any_other_line_is_a_protocol_error(line: bytes):
    for kind in (WorkerReport, Verdict):
        with pytest.raises(lines.ProtocolError, match=f"sent no {kind.__name__}"):
            unpack(kind, line)


# Rounds.


def test_start_read_with_its_arrival_keeps_the_workers_time():
    with job(2, spares=1) as running:
        # The server reads both reports of a worker together, as after a pause of its thread.
        reports = pack(WorkerReport(Act.STARTED, 1, 0)) + pack(WorkerReport(Act.ARRIVED, 1, 0, 4, 0.25))
        running.clients[1]._connection.socket.sendall(reports)
        running.verdicts(0)
        update = running.server.update_of(1)
    assert update is not None
    (gradient,) = update.contributions
    assert gradient.replica == 1
    assert gradient.arrival - gradient.start == pytest.approx(0.25, abs=1e-6)


def test_all_hear_the_same_and_late_ones_are_dropped():
    with job(3, spares=1) as running:
        for step in range(5):
            late = step % 3
            for worker in range(3):
                running.clients[worker].report(Act.WANTED, 1, step)
                running.clients[worker].report(Act.STARTED, 1, step)
            first, second = [worker for worker in range(3) if worker != late]
            running.clients[first].report(Act.ARRIVED, 1, step, 4, 0.01)
            running.clients[second].report(Act.ARRIVED, 1, step, 5, 0.01)
            verdicts = running.verdicts(step)
            assert len(set(verdicts)) == 1 and verdicts[0] is not None
            assert set(verdicts[0].workers) == {first, second}
            assert verdicts[0].count == 9
            # Which was late before is counted with this update, if its gradient came in time for that.
            running.clients[late].report(Act.ARRIVED, 1, step, 4, 0.01)
        assert running.lines == []


def test_who_has_not_started_yet_hears_the_verdict_when_it_asks():
    with job(3, spares=2) as running:
        for step in range(3):
            running.contribute(0, step)
            assert running.clients[0].wait(1, step) is not None
        for step in range(3):
            verdict = running.clients[2].wait(1, step)
            assert verdict is not None and verdict.workers == (0,)


def test_dropped_gradients_are_reported_with_the_next_update():
    with job(2, spares=1) as running:
        running.contribute(0, 0)
        running.verdicts(0)
        running.contribute(1, 0)
        # The same connection keeps the order: it is heard before this.
        running.contribute(1, 1)
        verdict = running.verdicts(1)[0]
        assert verdict is not None and (verdict.workers, verdict.dropped) == ((1,), (1,))
        # The log of the chief counts it, too.
        update = running.server.update_of(2)
    assert update is not None
    outcomes = [(each.replica, each.outcome, each.staleness) for each in update.contributions]
    assert outcomes == [(1, Outcome.DROPPED, 1), (1, Outcome.ACCEPTED, 0)]


def test_a_pass_ends_for_all_and_what_had_arrived_is_given_up():
    with job(2, spares=0) as running:
        running.contribute(0, 0)
        running.clients[1].report(Act.WANTED, 1, 0)
        running.clients[1].report(Act.STARTED, 1, 0)
        running.clients[1].report(Act.ENDED, 1, 0)
        assert running.verdicts(0) == [None, None]
        # What arrives for the pass before does not count, and the same worker may start again.
        running.clients[0].report(Act.ARRIVED, 1, 0, 4, 0.01)
        running.contribute(0, 0, number=2, examples=1)
        running.contribute(1, 0, number=2, examples=1)
        verdicts = running.verdicts(0, number=2)
        assert verdicts[0] is not None and (set(verdicts[0].workers), verdicts[0].count) == ({0, 1}, 2)
        # Passes within a pass end by themselves: those of a `fit` in a callback.
        running.contribute(0, 1, number=4)
        running.clients[1].report(Act.WANTED, 4, 1)
        running.clients[1].report(Act.ENDED, 4, 1)
        assert running.verdicts(1, number=4) == [None, None]
        for worker in range(2):
            running.contribute(worker, 1, number=3)
        assert None not in running.verdicts(1, number=3)


def test_it_is_said_who_is_waited_for():
    with job(3, spares=0) as running:
        running.contribute(0, 0)
        running.clients[1].report(Act.WANTED, 1, 0)
        wanted = "2 of worker:1, worker:2 (has not come to this step yet)"
        heard = threading.Event()

        def look() -> None:
            if running.clients[0].waited_for() == wanted:
                heard.set()
                raise InterruptedError

        with pytest.raises(InterruptedError):
            running.clients[0].wait(1, 0, look)
        assert heard.is_set()


def test_an_update_that_nobody_gets_on_with_is_an_error_that_names_them():
    now = [0.0]
    with job(0, spares=0) as running:
        client = running.join(0, clock=lambda: now[0])
        running.clients.append(client)
        running.contribute(0, 0)

        def look() -> None:
            if client.waited_for() == "1 of worker:1 (has not come to this step yet)":
                now[0] += 300.0

        with pytest.raises(TimeoutError, match=r"step 0 waits for 1 of worker:1 .*stall_timeout_secs=600"):
            client.wait(1, 0, look)
        assert now[0] == 600.0


# Strangers.


def _raw(running: Job) -> socket.socket:
    return socket.create_connection(running.address, 10)


def test_a_wrong_secret_is_refused_by_both_sides():
    with job(2, spares=0) as running:
        with pytest.raises(ConnectionError, match="TFDIST_JOB_SECRET"):
            running.join(0, secret=b"another")
        assert running.said.acquire(timeout=10)
        assert "does not know this job's secret" in running.lines[0]
        running.assert_updates_are_made()


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"tfdist quorum-4 worker:0 nonce proof\n"])
def test_garbage_is_cut_off_and_disturbs_nobody(garbage: bytes):
    with job(2, spares=0) as running:
        with _raw(running) as stranger, contextlib.suppress(ConnectionError):
            stranger.sendall(garbage)
            while stranger.recv(1000):
                pass
        assert running.said.acquire(timeout=10)
        assert len(running.lines) == 1 and "closed a connection from 127.0.0.1" in running.lines[0]
        running.assert_updates_are_made()


def test_a_second_worker_of_the_same_number_is_refused():
    with job(2, spares=0) as running:
        with pytest.raises(ConnectionError, match="does not accept worker:1"):
            running.join(1)
        running.assert_updates_are_made()


def test_a_client_that_gave_way_to_strangers_reconnects(monkeypatch: pytest.MonkeyPatch):
    with job(0, spares=0) as running, contextlib.ExitStack() as stack:
        tried = threading.Event()

        class Slow(lines.Connection):
            def introduce(self, *args: Any) -> None:
                if not tried.is_set():
                    tried.set()
                    crowd = [stack.enter_context(_raw(running)) for _ in range(200)]
                    # The last was greeted, so all before it were accepted.
                    assert crowd[-1].recv(1000)
                super().introduce(*args)

        monkeypatch.setattr(lines, "Connection", Slow)
        running.clients += [running.join(0), running.join(1)]
        running.assert_updates_are_made()


def test_a_flood_of_strangers_is_a_few_lines():
    with job(2, spares=0) as running, contextlib.ExitStack() as stack:
        for _ in range(500):
            stack.enter_context(_raw(running))
        while not any("more connections of strangers" in line for line in running.lines):
            assert running.said.acquire(timeout=30)
        assert len(running.lines) <= 50
        assert "more than 128 strangers" in running.lines[0]


# Losses.


def test_a_lost_worker_is_an_error_that_names_it():
    with job(3, spares=1) as running:
        running.clients[1].close()
        for worker in (0, 2):
            with pytest.raises(ConnectionError, match=r"worker:1 has ended.*the update of step 0 can't be made"):
                running.clients[worker].wait(1, 0)
        # Workers leave one after the other at the end of a program, too.
        assert not running.lines


def test_a_worker_that_is_cut_off_is_named():
    with job(2, spares=1) as running:
        running.clients[1]._connection.socket.sendall(b"garbage\n")
        assert running.said.acquire(timeout=10)
        assert running.lines[0].startswith("the quorum server closed the connection of worker:1, which ")


def test_what_was_decided_before_a_loss_holds():
    with job(3, spares=1) as running:
        running.contribute(0, 0)
        running.contribute(1, 0)
        assert running.clients[0].wait(1, 0) is not None
        running.clients[1].close()
        with pytest.raises(ConnectionError):
            running.clients[0].wait(1, 1)
        assert running.clients[2].wait(1, 0) is not None


def test_the_loss_of_the_server_is_an_error():
    with job(2, spares=0) as running:
        running.server.close()
        with pytest.raises(ConnectionError, match=r"the quorum server of worker:0 at 127\.0\.0\.1:\d+ is gone"):
            running.clients[1].wait(1, 0)


@pytest.mark.parametrize("kind", [ValueError, ZeroDivisionError])
def test_an_error_of_the_policy_is_the_chiefs_and_blames_no_worker(kind: type[Exception]):
    with job(2, spares=1) as running:
        running.server.on_error = running.clients[0].fail
        running.server._policy.accepts = mock.Mock(side_effect=kind("of my own policy"))  # type: ignore[method-assign]
        running.contribute(1, 0)
        with pytest.raises(kind, match="of my own policy"):
            running.clients[0].wait(1, 0)
        with pytest.raises(ConnectionError, match="the policy has failed; the update of step 0 can't be made"):
            running.clients[0].wait(1, 0)
        with pytest.raises(ConnectionError, match="is gone: it closed the connection"):
            running.clients[1].wait(1, 0)
        assert not running.clients[0].lost and not running.clients[1].lost


def test_a_silent_server_is_an_error(monkeypatch: pytest.MonkeyPatch):
    """One that accepts, proves who it is, and then says nothing any more."""
    monkeypatch.setattr(quorum, "SILENCE_SECS", 0.5)

    def silent(peer: lines.Peer) -> lines.Conversation:
        _, answer = yield from lines.identify(SECRET, "quorum-4", "worker:0")
        yield answer

    listener = _sockets.listen(0)
    with lines.LineServer(listener, silent):
        client = QuorumClient(("127.0.0.1", listener.getsockname()[1]), 0, ["worker:0"], SECRET)
        with pytest.raises(ConnectionError, match=r"has been silent for 0\.5 s"):
            client.wait(1, 0)
        client.close()


def test_a_line_of_frames_from_the_future_costs_only_its_sender():
    with job(3, spares=1) as running:
        running.clients[2].report(Act.ARRIVED, 1, 7, 4, 0.01)
        with pytest.raises(ConnectionError, match="worker:2"):
            running.clients[0].wait(1, 0)


def test_no_server_is_an_error():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()[:2]
    with pytest.raises(ConnectionError, match="can't be reached"):
        QuorumClient(address, 0, ["worker:0"], SECRET)
