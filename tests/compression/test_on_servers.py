# SPDX-License-Identifier: Apache-2.0
"""Codecs in server processes: requests, damaged messages, and codecs that are refused."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist.compression import PowerSGD, SignSGD, Threshold, TopK, on_servers

pytestmark = pytest.mark.devices

SPECS = [tf.TensorSpec([4, 3]), tf.TensorSpec([5])]
GRADIENTS = [np.linspace(-1, 1, 12, dtype=np.float32), np.arange(5, dtype=np.float32)]


@dataclasses.dataclass(frozen=True, repr=False)
class Own(SignSGD):
    """A codec that server processes can't find."""


@pytest.mark.parametrize("codec", [PowerSGD(2), Own(), "auto"])
def test_codec_that_servers_lack_is_refused(codec: object) -> None:
    with pytest.raises(
        ValueError, match=rf"policies: {re.escape(repr(codec))} does not go with ParameterServerStrategy"
    ):
        tfdist.ParameterServerStrategy(policies=[tfdist.Compression(codec)])


@pytest.mark.parametrize("codec", [TopK(0.3), TopK(0.3, momentum=0), SignSGD(), Threshold(0.5), Threshold()])
def test_worker_and_server_give_what_the_codec_gives(codec: on_servers.gathered.GatheredCodec) -> None:
    worker, server = on_servers.CodecServer("worker:3"), on_servers.CodecServer("ps:0")
    encode, decode = on_servers.request("encode", SPECS, codec), on_servers.request("decode", SPECS, codec)
    tensors = [tf.reshape(each, spec.shape) for each, spec in zip(GRADIENTS, SPECS, strict=True)]
    state = codec.init(SPECS)
    for _ in range(3):
        message, sender, *new = worker(encode, *GRADIENTS, *map(np.asarray, state.values()))
        assert sender.tobytes() == b"worker:3"
        expected, state = codec.encode(tensors, state)
        np.testing.assert_array_equal(message, expected)
        for found, value in zip(new, state.values(), strict=True):
            np.testing.assert_array_equal(found, np.reshape(value, -1))
        sums = codec.decode(expected[tf.newaxis], SPECS, ["worker:3"])
        for found, total in zip(server(decode, message, sender), sums, strict=True):
            np.testing.assert_array_equal(found, np.reshape(total, -1))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_damaged_halves_name_their_sender(dtype: str) -> None:
    worker, server = on_servers.CodecServer("worker:3"), on_servers.CodecServer("ps:0")
    halves = np.asarray(tf.bitcast(tf.cast(tf.range(17), dtype), tf.uint8)).reshape(-1)
    message, sender = worker(on_servers.request("frame", SPECS), halves)
    content = on_servers.request("content", SPECS)
    np.testing.assert_array_equal(server(content, message, sender)[0], halves)
    damaged = message.copy()
    damaged[-1] ^= 1
    other = on_servers.request("content", SPECS[:1])
    for asked, wrong in ((content, message[:-1]), (content, damaged), (other, message)):
        with pytest.raises(ValueError, match="the message of worker:3 can't be decoded: it was damaged on the way, or"):
            server(asked, wrong, sender)
