# SPDX-License-Identifier: Apache-2.0
"""Connections to hosts that have vanished end, and only these."""

import contextlib
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import threading

import pytest
from waiting import wait_until

from tfdist.cluster import Cluster, Task
from tfdist.coordination import keepalive

ROOT = pathlib.Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="this system does not tell a process its connections")


@pytest.fixture
def connect():
    """Makes a connection to a server here, on each call; gives the address and both ends."""
    with contextlib.ExitStack() as stack:

        def make(family=socket.AF_INET):
            host = "127.0.0.1" if family == socket.AF_INET else "::1"
            server = stack.enter_context(socket.create_server((host, 0), family=family))
            near = stack.enter_context(socket.create_connection(server.getsockname()[:2]))
            far, _ = server.accept()
            stack.enter_context(far)
            port = server.getsockname()[1]
            return (f"{host}:{port}" if family == socket.AF_INET else f"[{host}]:{port}"), near, far

        yield make


def is_probed(connection):
    return bool(connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE))


def user_timeout_ms(connection):
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)


def test_connections_to_tasks_are_probed_and_no_others(connect):
    address, near, _ = connect()
    _, stranger, _ = connect()
    watched = keepalive.Keepalive({"worker:0": address})
    watched.check()
    assert is_probed(near)
    assert not is_probed(stranger)
    idle, interval, count = (
        near.getsockopt(socket.IPPROTO_TCP, option)
        for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
    )
    assert idle + interval * count <= keepalive.LOST_SECS + idle
    assert user_timeout_ms(near) == 1000 * keepalive.LOST_SECS


def test_a_mapped_ipv4_peer_is_recognised(connect):
    if not socket.has_dualstack_ipv6():
        pytest.skip("there is no IPv6 here")
    address, _, _ = connect()
    with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as near:
        near.connect(("::ffff:127.0.0.1", int(address.rpartition(":")[2])))
        keepalive.Keepalive({"ps:0": address}).check()
        assert is_probed(near)


def test_an_unknown_host_name_keeps_nobody_waiting(connect):
    address, near, _ = connect()
    watched = keepalive.Keepalive({"worker:0": "no-such-host.invalid:2222", "worker:1": address})
    watched.check()
    assert is_probed(near)


def test_a_stopped_peer_with_full_buffers_is_not_given_up(connect):
    """The peer's kernel acknowledges, but takes no more: the limit for unacknowledged data would end the connection."""
    address, near, far = connect()
    watched = keepalive.Keepalive({"worker:0": address})
    watched.check()
    near.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            near.send(bytes(1 << 16))

    def limit_ms():
        watched.check()
        return user_timeout_ms(near)

    wait_until(lambda: not limit_ms())  # The last acknowledgement may be on its way.
    near.setblocking(True)
    reader = threading.Thread(target=lambda: _read_to_end(far))
    reader.start()
    near.sendall(b"x")
    wait_until(limit_ms)
    near.close()
    reader.join()


def _read_to_end(connection):
    while connection.recv(1 << 20):
        pass


def test_ending_a_task_ends_its_connections_only(connect):
    address, near, far = connect()
    other_address, other, _ = connect()
    watched = keepalive.Keepalive({"worker:0": address, "worker:1": other_address})
    assert watched.end("worker:0") == 1
    assert near.recv(1) == b"" == far.recv(1)
    other.settimeout(0.01)
    with pytest.raises(TimeoutError):
        other.recv(1)


def test_a_cluster_without_its_own_task_and_evaluator_is_watched(monkeypatch):
    found = []
    monkeypatch.setattr(keepalive.Keepalive, "start", lambda watched: found.append(watched))
    jobs = {"chief": {0: "h:1"}, "worker": {0: "h:2"}, "ps": {0: "h:3"}, "evaluator": {0: "h:4"}}
    keepalive.watch(Cluster(jobs, Task("chief", 0)))
    assert sorted(found[0]._addresses) == ["ps:0", "worker:0"]


VANISHING = """
import socket, subprocess, sys
from tfdist.coordination import keepalive

def ip(*commands):
    for command in commands:
        subprocess.run(["ip", *command.split()], check=True)

ip("link set lo up", "addr add 10.1.1.1/32 dev lo", "addr add 10.1.1.2/32 dev lo")
server = socket.create_server(("10.1.1.1", 0))
near = [socket.create_connection(server.getsockname(), source_address=("10.1.1.2", 0)) for _ in range(2)]
far = [server.accept()[0] for _ in near]
host, port = server.getsockname()
keepalive.LOST_SECS, keepalive._PROBE_EVERY_SECS = 2, 1
keepalive.Keepalive({"worker:0": f"{host}:{port}"}).check()
# From now on every packet to that host is lost, and nobody is told.
ip("link add away type veth peer name nowhere", "link set away up", "link set nowhere up")
ip("neigh add 10.1.1.1 lladdr 02:00:00:00:00:01 dev away", "route add 10.1.1.1/32 dev away")
ip("addr del 10.1.1.1/32 dev lo")
near[1].send(b"never arrives")
for connection in near:
    try:
        connection.recv(1)
    except OSError as error:
        print(type(error).__name__)
"""


@pytest.mark.processes
def test_a_vanished_peer_ends_a_call_that_waits():
    """Takes the peer's address away in a network of its own: one call waits, the other has data under way."""
    isolate = ["unshare", "--map-root-user", "--net"]
    if not all(map(shutil.which, ("unshare", "ip"))):
        pytest.skip("there is no unshare or ip here")
    probe = [*isolate, "ip", "link", "add", "away", "type", "veth", "peer", "name", "nowhere"]
    if subprocess.run(probe, capture_output=True, timeout=20).returncode:
        pytest.skip("this user may make no network namespace with links")
    done = subprocess.run(
        [*isolate, sys.executable, "-c", VANISHING], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.stderr == ""
    assert done.stdout.split() in (["TimeoutError"] * 2, ["OSError"] * 2, ["TimeoutError", "OSError"])


def test_sockets_of_others_stay_blocking_whatever_the_default_timeout(connect):
    address, near, _ = connect()
    near.setblocking(True)
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(30)
    try:
        keepalive.Keepalive({"worker:0": address}).check()
    finally:
        socket.setdefaulttimeout(before)
    assert os.get_blocking(near.fileno())


def test_a_name_with_another_address_than_before_is_watched(connect, monkeypatch):
    monkeypatch.setattr(keepalive, "_RESOLVE_EVERY_SECS", 0.0)
    (_, _, _), (address, near, _) = connect(), connect()
    port = int(address.rpartition(":")[2])
    answers = iter(["192.0.2.1", "127.0.0.1"])
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda *_, **__: [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (next(answers), port))]
    )
    watched = keepalive.Keepalive({"worker:0": f"worker-0.job:{port}"})
    watched.check()
    assert not near.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    watched.check()
    assert near.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
