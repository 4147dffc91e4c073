# SPDX-License-Identifier: Apache-2.0
"""Reserved ports: nobody else gets them, and TensorFlow's server does."""

import os
import socket
import subprocess
import sys

import pytest

from tfdist.launchers.supervise.processes import PortReservation


def test_no_port_is_given_out_twice_while_it_is_reserved():
    code = "from tfdist.launchers.supervise import processes as p; r = p.PortReservation(700); "
    code += "print(*r.ports, flush=True); input()"
    command = [sys.executable, "-c", code]
    launchers = [subprocess.Popen(command, stdin=-1, stdout=-1, text=True) for _ in range(2)]
    with PortReservation(700) as reservation:
        ports = [*reservation.ports]
        for launcher in launchers:
            ports += map(int, launcher.stdout.readline().split())
        for launcher in launchers:
            launcher.communicate("\n", timeout=30)
    assert len(ports) == len(set(ports)) == 2100


def test_no_connection_starts_from_a_reserved_port():
    with PortReservation(1) as reservation, socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as client:
        with pytest.raises(OSError):
            client.bind(("127.0.0.1", reservation.ports[0]))
        client.connect(server.getsockname())
        assert client.getsockname()[1] != reservation.ports[0]


@pytest.mark.processes
def test_a_tensorflow_server_starts_on_a_port_that_is_still_reserved():
    code = (
        "import sys, tensorflow as tf\n"
        "tf.distribute.Server({'worker': [f'127.0.0.1:{sys.argv[1]}']}, job_name='worker', task_index=0)\n"
        "print('serving', flush=True); input()"
    )
    with PortReservation(1) as reservation:
        command = [sys.executable, "-c", code, str(reservation.ports[0])]
        env = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1"}
        with subprocess.Popen(command, stdin=-1, stdout=-1, text=True, env=env) as server:
            try:
                assert server.stdout.readline() == "serving\n"
                socket.create_connection(("127.0.0.1", reservation.ports[0]), timeout=10).close()
            finally:
                server.kill()
