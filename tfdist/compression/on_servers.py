# SPDX-License-Identifier: Apache-2.0
"""Codecs in the server processes of parameter-server training: encoding on a worker, decoding on a parameter server.

    worker                                         parameter server
      gradients --> encode, with the state of       decode --> gradients --> update
                    this worker             --message-->

`HalfPrecision` rounds in TensorFlow's operations; only the frame around the halves, with its checksum, is made here.

A server process has no graph of its own and hardly any of TensorFlow's Python, so this module calls the codecs on
arrays. The process that has traced a step refers to codec, state and tensors by descriptions, which are strings.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist import compression
from tfdist.compression import codec, frames, gathered

# Bytes before a block, which are the number of bytes of all blocks.
_LENGTH_BYTES = 8
# Codecs that a server process can find by name.
_GATHERED: tuple[type[gathered.GatheredCodec], ...] = (compression.Threshold, compression.TopK, compression.SignSGD)


def check(chosen: Any, received: str) -> None:
    """Checks that a codec can be used between workers and parameter servers.

    Args:
      chosen: argument of `tfdist.Compression`.
      received: end of the error message.

    Raises:
      ValueError: the codec sums between the workers, or is not one of `tfdist.compression`.
    """
    if type(chosen) in (*_GATHERED, compression.HalfPrecision):
        return
    names = ", ".join(f"tfdist.compression.{kind.__name__}" for kind in (compression.HalfPrecision, *_GATHERED))
    reason = "server processes know the codecs of tfdist.compression only"
    if type(chosen) is compression.PowerSGD:
        reason = "it needs two sums over all workers in each step, and each worker sends to parameter servers by itself"
    if chosen == "auto":
        reason = "only workers of tfdist.MultiWorkerMirroredStrategy measure the network between them"
    raise ValueError(
        f"policies: {chosen!r} does not go with ParameterServerStrategy: {reason}; use {names}. {received}"
    )


def encode_request(
    chosen: gathered.GatheredCodec, specs: Sequence[tf.TensorSpec], key: str, ended: Sequence[str] = ()
) -> bytes:
    """Returns the request by which a worker encodes gradients; its arrays are the gradients, float32 [size] each.

    Args:
      chosen: the codec.
      specs: of the gradients, floating-point with static shapes.
      key: names the state of the codec in the worker's process.
      ended: beginnings of the keys of states that the worker may drop.
    """
    state = {name: [value.shape.num_elements(), value.dtype.name] for name, value in chosen.state_specs(specs).items()}
    return _request(
        "encode", codec=_described(chosen), sizes=codec.sizes_of(specs), key=key, state=state, ended=list(ended)
    )


def decode_request(chosen: gathered.GatheredCodec, specs: Sequence[tf.TensorSpec]) -> bytes:
    """Returns the request by which a parameter server decodes a message; its arrays are the two that encoding returns.

    Args:
      chosen: the codec.
      specs: of the gradients.
    """
    return _request("decode", codec=_described(chosen), sizes=codec.sizes_of(specs))


def frame_request(specs: Sequence[tf.TensorSpec]) -> bytes:
    """Returns the request by which a worker puts halves into a frame; its array is the halves as uint8.

    Args:
      specs: of the gradients.
    """
    return _request("frame", sizes=codec.sizes_of(specs))


def content_request(specs: Sequence[tf.TensorSpec]) -> bytes:
    """Returns the request by which a parameter server takes the halves, uint8, out of a frame.

    Its arrays are the two that the answer to `frame_request` has.

    Args:
      specs: of the gradients.
    """
    return _request("content", sizes=codec.sizes_of(specs))


def probe_request() -> bytes:
    """Returns the request to which a server process answers with its name, uint8 [length]."""
    return _request("probe")


def collect_request(prefix: str) -> bytes:
    """Returns the request to which a worker answers with a block of all states whose keys begin with `prefix`.

    Its array is [first byte of the block, most bytes of it], int64. The first request is for the block from 0 on, which
    takes the states as they are then. The answer is for `block_of`.
    """
    return _request("collect", prefix=prefix)


def block_of(answer: np.ndarray) -> tuple[int, np.ndarray]:
    """Returns the bytes of all blocks, and the block, uint8, from the answer to `collect_request`.

    They are 0 if the worker's process is another one than that of the first block.
    """
    return int(answer[:_LENGTH_BYTES].view(np.int64)[0]), answer[_LENGTH_BYTES:]


def restore_request(prefix: str) -> bytes:
    """Returns the request by which a worker replaces these states, once all blocks of `collect_request` are there.

    Its arrays are the block, uint8, and [first byte of the block, bytes of all blocks], int64. Blocks come in order.
    """
    return _request("restore", prefix=prefix)


class CodecServer:
    """Answers the requests of steps in one server process; any thread may call it.

    Args:
      task: name of the process, such as "worker:0".
    """

    def __init__(self, task: str) -> None:
        self._task = task
        self._lock = threading.Lock()
        self._states: dict[str, gathered.Arrays] = {}
        self._prepared: dict[bytes, _Prepared] = {}
        # States on their way to a checkpoint and from it, by prefix.
        self._collected: dict[str, memoryview] = {}
        self._restored: dict[str, bytearray] = {}

    def __call__(self, request: Any, *given: Any) -> list[np.ndarray]:
        """Answers a request.

        Args:
          request: JSON, UTF-8 bytes, from one of the functions of this module.
          *given: the request's arrays.

        Raises:
          ValueError: a message can't be decoded; its sender is named.
        """
        request = bytes(np.asarray(request, object).item())
        with self._lock:
            if request not in self._prepared:
                self._prepared[request] = _Prepared(json.loads(request))
                self._drop(tuple(self._prepared[request].content.get("ended", ())))
            prepared = self._prepared[request]
        method = getattr(self, f"_{prepared.content['method']}")
        return method(prepared, *(np.asarray(each).reshape(-1) for each in given))

    def _drop(self, ended: tuple[str, ...]) -> None:
        self._states = {key: state for key, state in self._states.items() if not key.startswith(ended)}
        self._prepared = {
            request: prepared
            for request, prepared in self._prepared.items()
            if not prepared.content.get("key", "").startswith(ended)
        }

    def _probe(self, prepared: _Prepared) -> list[np.ndarray]:
        del prepared
        return [self._name()]

    def _encode(self, prepared: _Prepared, *gradients: np.ndarray) -> list[np.ndarray]:
        key = prepared.content["key"]
        # One step of a worker after the other: each needs the state that the last one has left.
        with self._lock:
            state = self._states.get(key)
            if state is None or _described_state(state) != prepared.content["state"]:
                state = {name: np.zeros(size, dtype) for name, (size, dtype) in prepared.content["state"].items()}
            message, new = prepared.codec.message_of(gradients, state, prepared.layout, prepared.pool)
            self._states[key] = new
        return [message, self._name()]

    def _decode(self, prepared: _Prepared, message: np.ndarray, sender: np.ndarray) -> list[np.ndarray]:
        name = sender.tobytes().decode(errors="replace")
        return prepared.codec.sum_of(message[np.newaxis], prepared.content["sizes"], [name], prepared.pool)

    def _frame(self, prepared: _Prepared, halves: np.ndarray) -> list[np.ndarray]:
        return [frames.build(compression.HalfPrecision.number, 0, prepared.layout, [halves]), self._name()]

    def _content(self, prepared: _Prepared, message: np.ndarray, sender: np.ndarray) -> list[np.ndarray]:
        try:
            _, halves = frames.parse(message, compression.HalfPrecision.number, prepared.layout)
            if halves.size != 2 * prepared.layout.num_values:
                raise ValueError(f"it has {halves.size} bytes, not {2 * prepared.layout.num_values}")
        except ValueError as error:
            name = sender.tobytes().decode(errors="replace")
            raise ValueError(f"the message of {name} can't be decoded: {error}") from None
        return [halves]

    def _collect(self, prepared: _Prepared, block: np.ndarray) -> list[np.ndarray]:
        prefix, (first, most) = prepared.content["prefix"], block.tolist()
        if first == 0:
            self._collected[prefix] = self._saved(prefix)
        saved = self._collected.get(prefix, memoryview(b""))
        if first + most >= len(saved):
            self._collected.pop(prefix, None)
        length = np.array([len(saved)], np.int64).view(np.uint8)
        return [np.concatenate([length, np.frombuffer(saved[first : first + most], np.uint8)])]

    def _saved(self, prefix: str) -> memoryview:
        file = io.BytesIO()
        with self._lock:
            found = [(key, state) for key, state in sorted(self._states.items()) if key.startswith(prefix)]
            names = [[key.removeprefix(prefix), list(state)] for key, state in found]
            contents = [value for _, state in found for value in state.values()]
            np.savez(file, np.frombuffer(json.dumps(names).encode(), np.uint8), *contents)
        return file.getbuffer()

    def _restore(self, prepared: _Prepared, block: np.ndarray, position: np.ndarray) -> list[np.ndarray]:
        prefix, (first, total) = prepared.content["prefix"], position.tolist()
        if first == 0:
            self._restored[prefix] = bytearray()
        # Empty in a process that was started since the first block: its states stay empty, as those of a lost worker.
        received = self._restored.get(prefix)
        if received is None or len(received) != first:
            # The latter is a block of an attempt that was given up.
            return [self._name()]
        received += block.tobytes()
        if len(received) >= total:
            restored = _loaded(self._restored.pop(prefix))
            with self._lock:
                kept = {key: state for key, state in self._states.items() if not key.startswith(prefix)}
                self._states = {**kept, **{prefix + key: state for key, state in restored.items()}}
        return [self._name()]

    def _name(self) -> np.ndarray:
        return np.frombuffer(self._task.encode(), np.uint8).copy()


@dataclasses.dataclass
class _Prepared:
    """A request, and what all of its calls share."""

    content: dict[str, Any]
    pool: frames.Pool = dataclasses.field(default_factory=frames.Pool)

    @functools.cached_property
    def codec(self) -> gathered.GatheredCodec:
        name, arguments = self.content["codec"]
        return {kind.__name__: kind for kind in _GATHERED}[name](**arguments)

    @functools.cached_property
    def layout(self) -> frames.FrameLayout:
        return frames.FrameLayout.of(self.content["sizes"])


def _request(method: str, **content: Any) -> bytes:
    return json.dumps({"method": method, **content}).encode()


def _described(chosen: gathered.GatheredCodec) -> list[Any]:
    return [type(chosen).__name__, dataclasses.asdict(chosen)]


def _described_state(state: gathered.Arrays) -> dict[str, list[Any]]:
    return {name: [value.size, value.dtype.name] for name, value in state.items()}


def _loaded(saved: bytearray) -> dict[str, gathered.Arrays]:
    with np.load(io.BytesIO(saved), allow_pickle=False) as found:
        names, *values = (found[name] for name in found.files)
    supply = iter(values)
    return {key: {name: next(supply) for name in state} for key, state in json.loads(names.tobytes())}
