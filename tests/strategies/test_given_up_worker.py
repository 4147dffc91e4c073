# SPDX-License-Identifier: Apache-2.0
"""A worker that says nothing any more, and closes nothing: the chief goes on once the launcher has given it up."""

import contextlib
import os
import pathlib
import selectors
import socket
import sys
import threading

import programs
import pytest

from tfdist.cluster import NOTICES_VARIABLE, Cluster, Task
from tfdist.launchers.supervise.notices import GIVEN_UP
from tfdist.launchers.supervise.processes import PortReservation, Supervisor

CHIEF = """
import pathlib
strategy = tfdist.ParameterServerStrategy(stall_timeout_secs=200)
class Show(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        print("epoch", epoch, flush=True)
        # Trains on until the worker is given up, and a little more.
        self.model.stop_training = pathlib.Path("over").exists()
made = model(strategy)
data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8).repeat()
made.fit(data, epochs=10**6, steps_per_epoch=20, verbose=0, callbacks=[Show()])
print("trained", flush=True)
"""


class Proxy:
    """Forwards connections to a port, until it is silent: then it reads and writes nothing, and closes nothing."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        self._ends: list[socket.socket] = []
        self._over = False
        self.is_silent = False
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Proxy":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over = True
        self._thread.join()
        for each in (*self._ends, self._server):
            each.close()
        self._selector.close()

    def _run(self) -> None:
        while not self._over:
            for key, _ in self._selector.select(0.05):
                if self.is_silent:
                    break
                if key.fileobj is self._server:
                    self._accept()
                else:
                    self._forward(key.fileobj, key.data)

    def _accept(self) -> None:
        near, _ = self._server.accept()
        try:
            far = socket.create_connection(("127.0.0.1", self._port))
        except OSError:
            near.close()
            return
        self._ends += [near, far]
        for one, other in ((near, far), (far, near)):
            self._selector.register(one, selectors.EVENT_READ, other)

    def _forward(self, one: socket.socket, other: socket.socket) -> None:
        data = b""
        with contextlib.suppress(OSError):
            data = one.recv(1 << 16)
            other.sendall(data)
        if not data:
            self._selector.unregister(one)
            with contextlib.suppress(OSError):
                other.shutdown(socket.SHUT_WR)


@pytest.mark.processes
def test_the_chief_goes_on_when_the_launcher_gives_a_worker_up(tmp_path: pathlib.Path) -> None:
    notices = tmp_path / "notices"
    notices.touch()
    with PortReservation(4) as reservation, Proxy(reservation.ports[1]) as proxy, Supervisor() as supervisor:
        first, second, server, chief = reservation.ports
        jobs = {"chief": {0: chief}, "worker": {0: first, 1: proxy.port}, "ps": {0: server}}

        def config(task: Task, **own: dict[int, int]) -> str:
            found = {
                job: {index: f"127.0.0.1:{port}" for index, port in tasks.items()}
                for job, tasks in {**jobs, **own}.items()
            }
            return Cluster(found, task).to_tf_config()

        configs = {
            "worker:0": config(Task("worker", 0)),
            "worker:1": config(Task("worker", 1), worker={0: first, 1: second}),
            "ps:0": config(Task("ps", 0)),
        }
        root = str(programs.ROOT)
        for name, text in configs.items():
            env = {**os.environ, "TF_CONFIG": text, "PYTHONPATH": root}
            supervisor.start(name, [sys.executable, "-m", "tfdist.serving.task"], env)
        env = {"TF_CONFIG": config(Task("chief", 0)), NOTICES_VARIABLE: str(notices), "PYTHONPATH": root}
        with programs.running(CHIEF, tmp_path, env) as program:
            program.wait_for_output("epoch 2")
            proxy.is_silent = True
            notices.write_text(f"{GIVEN_UP}worker:1\n")
            program.wait_for_output("the launcher has given up worker:1; going on without it")
            epochs = program.output.count("epoch")
            program.wait_for_output(f"epoch {epochs + 2}\n")
            (tmp_path / "over").touch()
            program.wait_for_output("trained")
