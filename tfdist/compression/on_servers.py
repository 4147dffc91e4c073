# SPDX-License-Identifier: Apache-2.0
"""Codecs in the server processes of parameter-server training: encoding on a worker, decoding on a parameter server.

    worker                                         parameter server
      gradients, state --> encode --> state         decode --> gradients --> update
                                            --message-->

`HalfPrecision` rounds in TensorFlow's operations; only the frame around the halves, with its checksum, is made here.

A server process has no graph of its own and hardly any of TensorFlow's Python, so this module calls the codecs on
arrays. The process that has traced a step describes codec and tensors by strings.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist import compression
from tfdist.compression import codec, frames, gathered

# Codecs that a server process can find by name.
_GATHERED: tuple[type[gathered.GatheredCodec], ...] = (compression.Threshold, compression.TopK, compression.SignSGD)


def check_codec(chosen: Any, received: str) -> None:
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
    raise ValueError(
        f"policies: {chosen!r} does not go with ParameterServerStrategy: each worker sends to the servers by itself, "
        f"and they know some codecs only; use {names}. {received}"
    )


def request(method: str, specs: Sequence[tf.TensorSpec] = (), chosen: gathered.GatheredCodec | None = None) -> bytes:
    """Returns a request to a server process; all of its arrays are 1-D.

    | method | on the | arrays | answer |
    |---|---|---|---|
    | "encode" | worker | gradients, float32, and the codec's state | message, name of the worker, new state |
    | "decode" | parameter server | message, name of its sender | gradients, float32 |
    | "frame" | worker | halves, as uint8 | message, name of the worker |
    | "content" | parameter server | message, name of its sender | halves, as uint8 |
    | "probe" | any | | name of the process |

    Args:
      method: of these.
      specs: of the gradients, floating-point with static shapes.
      chosen: the codec that encodes or decodes them.
    """
    content: dict[str, Any] = {"method": method, "sizes": codec.sizes_of(specs)}
    if chosen is not None:
        content["codec"] = [type(chosen).__name__, dataclasses.asdict(chosen)]
        content["state"] = list(chosen.state_specs(specs))
    return json.dumps(content).encode()


class CodecServer:
    """Answers the requests of steps in one server process; any thread may call it.

    Args:
      task: name of the process, such as "worker:0".
    """

    def __init__(self, task: str) -> None:
        self._task = task

    def __call__(self, request: Any, *given: Any) -> list[np.ndarray]:
        """Answers a request.

        Args:
          request: of `request`.
          *given: the request's arrays.

        Raises:
          ValueError: a message can't be decoded; its sender is named.
        """
        prepared = _prepared(bytes(np.asarray(request, object).item()))
        method = getattr(self, f"_{prepared.content['method']}")
        return method(prepared, *(np.asarray(each).reshape(-1) for each in given))

    def _probe(self, prepared: _Prepared) -> list[np.ndarray]:
        del prepared
        return [self._name()]

    def _encode(self, prepared: _Prepared, *arrays: np.ndarray) -> list[np.ndarray]:
        count = len(prepared.content["sizes"])
        state = dict(zip(prepared.content["state"], arrays[count:], strict=True))
        message, new = prepared.codec.message_of(arrays[:count], state)
        return [message, self._name(), *(new[name] for name in state)]

    def _decode(self, prepared: _Prepared, message: np.ndarray, sender: np.ndarray) -> list[np.ndarray]:
        return prepared.codec.sum_of(message[np.newaxis], prepared.content["sizes"], [_text(sender)])

    def _frame(self, prepared: _Prepared, halves: np.ndarray) -> list[np.ndarray]:
        return [frames.build(prepared.origin_of_halves, 0, [halves]), self._name()]

    def _content(self, prepared: _Prepared, message: np.ndarray, sender: np.ndarray) -> list[np.ndarray]:
        _, halves = frames.parse(message, prepared.origin_of_halves, _text(sender))
        return [halves]

    def _name(self) -> np.ndarray:
        return np.frombuffer(self._task.encode(), np.uint8).copy()


@dataclasses.dataclass
class _Prepared:
    """A request, and what all of its calls share."""

    content: dict[str, Any]

    @functools.cached_property
    def codec(self) -> gathered.GatheredCodec:
        name, arguments = self.content["codec"]
        return {kind.__name__: kind for kind in _GATHERED}[name](**arguments)

    @functools.cached_property
    def origin_of_halves(self) -> int:
        return frames.origin_of(compression.HalfPrecision.__name__, self.content["sizes"])


@functools.cache
def _prepared(request: bytes) -> _Prepared:
    return _Prepared(json.loads(request))


def _text(name: np.ndarray) -> str:
    return name.tobytes().decode(errors="replace")
