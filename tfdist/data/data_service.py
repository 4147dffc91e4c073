# SPDX-License-Identifier: Apache-2.0
"""Starts the servers of the tf.data service that prepare batches for `data_sharding="dynamic"`.

A client of the service retries a dead producer without end, because it might be restarted; and what a dead
producer had taken on is lost with it. So data that end are prepared here, in the chief's process: a pass can then
lose no more than the batches that a lost worker had fetched, and it always ends. Endless data have no end to wait
for, and those that remain go on producing: the workers prepare them together, where they know of a dispatcher.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

# gRPC takes it instead of `no_proxy`; read when a connection is made.
_NO_PROXY = "no_grpc_proxy"


class DataService:
    """The chief's part: dispatchers, and a producer of its own; each is started when it is first needed.

    Args:
      host: The name under which the workers reach this process.
      shared: "host:port" of the dispatcher that the workers look for, if they do.
    """

    def __init__(self, host: str, shared: str | None):
        self._host = host
        self._shared = shared
        self._dispatcher: tf.data.experimental.service.DispatchServer | None = None
        # The servers run for the lifetime of these objects.
        self._own: tuple[str, list[Any]] | None = None

    def prepare(self) -> None:
        """Starts the dispatcher that the workers look for."""
        if self._shared is not None and self._dispatcher is None:
            service = tf.data.experimental.service
            port = int(self._shared.rpartition(":")[2])
            self._dispatcher = service.DispatchServer(service.DispatcherConfig(port=port))

    def close(self) -> None:
        """Ends the servers; may be called again."""
        self._dispatcher = self._own = None

    def address(self, endless: bool) -> str:
        """The dispatcher for data that are `endless` or not, "grpc://host:port"."""
        if endless and self._shared is not None:
            self.prepare()
            return f"grpc://{self._shared}"
        if self._own is None:
            self._own = self._start_own()
        return self._own[0]

    def _start_own(self) -> tuple[str, list[Any]]:
        service = tf.data.experimental.service
        dispatcher = service.DispatchServer(service.DispatcherConfig(port=0))
        port = dispatcher.target.rpartition(":")[2]
        # `WorkerServer` holds Python's lock until the dispatcher has registered it, without a time limit. So it gets
        # the one address that this process certainly reaches: its own name may be known to the other tasks only.
        near = f"127.0.0.1:{port}"
        config = service.WorkerConfig(dispatcher_address=near, worker_address=f"{self._host}:%port%", port=0)
        with _no_proxy_to("127.0.0.1"):
            return f"grpc://{self._host}:{port}", [dispatcher, service.WorkerServer(config)]


@contextlib.contextmanager
def _no_proxy_to(host: str) -> Iterator[None]:
    """Exempts a host from `http_proxy` within this block, so that gRPC connects to it directly."""
    before = os.environ.get(_NO_PROXY)
    os.environ[_NO_PROXY] = ",".join(filter(None, [before or os.environ.get("no_proxy"), host]))
    try:
        yield
    finally:
        if before is None:
            del os.environ[_NO_PROXY]
        else:
            os.environ[_NO_PROXY] = before
