# SPDX-License-Identifier: Apache-2.0
"""Values of TensorBoard's summaries: scalars, histograms, text, the layout of custom scalars, and hparams.

The last two are protos of the package tensorboard, which need not be installed to write them: they are encoded here.
"""

from __future__ import annotations

import collections
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf
from google.protobuf import struct_pb2

from tfdist.telemetry.histogram import Histogram

_PREFIX = "tfdist/"
# Status of a session in the hparams plugin.
SUCCESS, RUNNING = 1, 3


def scalar(name: str, value: float) -> Any:
    """Returns a scalar with the tag tfdist/<name>."""
    return tf.compat.v1.Summary.Value(tag=_PREFIX + name, simple_value=value)


def histogram(name: str, values: Histogram) -> Any:
    """Returns a histogram of seconds; it must not be empty."""
    limits = [0.0, *(limit for limit, _ in values.buckets())]
    counts = [0, *(count for _, count in values.buckets())]
    return _histogram(name, values.least, values.most, values.count, values.total, values.squares, limits, counts)


def counts(name: str, given: collections.Counter[int]) -> Any:
    """Returns a histogram of whole numbers; it must not be empty."""
    rows = sorted(given.items())
    total = sum(value * count for value, count in rows)
    squares = sum(value * value * count for value, count in rows)
    # A bucket ends half a number above.
    limits = [rows[0][0] - 0.5, *(value + 0.5 for value, _ in rows)]
    shares = rows[0][0], rows[-1][0], given.total(), total, squares
    return _histogram(name, *shares, limits, [0, *(count for _, count in rows)])


def _histogram(
    name: str,
    least: float,
    most: float,
    number: int,
    total: float,
    squares: float,
    limits: Sequence[float],
    bucket_counts: Sequence[int],
) -> Any:
    proto = tf.compat.v1.HistogramProto(
        min=least, max=most, num=number, sum=total, sum_squares=squares, bucket_limit=limits, bucket=bucket_counts
    )
    return tf.compat.v1.Summary.Value(tag=_PREFIX + name, histo=proto)


def text(name: str, line: str) -> Any:
    """Returns text for the Text tab; it is shown as it is, not as Markdown."""
    shown = "\n".join("    " + each for each in line.splitlines())
    return _tensor(_PREFIX + name, "text", b"", tf.make_tensor_proto([shown.encode()], tf.string))


def layout(categories: Mapping[str, Mapping[str, Sequence[str]]]) -> Any:
    """Returns the layout of the Custom Scalars tab: by category its charts, by chart regular expressions of tags."""
    content = _varint_field(1, 0)
    for title, charts in categories.items():
        category = _bytes_field(1, title.encode())
        for name, tags in charts.items():
            lines = b"".join(_bytes_field(1, tag.encode()) for tag in tags)
            category += _bytes_field(2, _bytes_field(1, name.encode()) + _bytes_field(2, lines))
        content += _bytes_field(2, category)
    return _tensor("custom_scalars__config__", "custom_scalars", b"", tf.make_tensor_proto(content, tf.string))


def session_start(hparams: Mapping[str, str | float | bool], start_secs: float) -> Any:
    """Returns the hyperparameters of a run, for the HParams tab."""
    session = b""
    for name, value in hparams.items():
        proto = struct_pb2.Value()
        if isinstance(value, bool):
            proto.bool_value = value
        elif isinstance(value, str):
            proto.string_value = value
        else:
            proto.number_value = value
        entry = _bytes_field(1, name.encode()) + _bytes_field(2, proto.SerializeToString())
        session += _bytes_field(1, entry)
    session += _double_field(5, start_secs)
    return _hparams("_hparams_/session_start_info", _bytes_field(3, session))


def session_end(status: int, end_secs: float) -> Any:
    """Returns the end of a run, for the HParams tab."""
    return _hparams(
        "_hparams_/session_end_info", _bytes_field(4, _varint_field(1, status) + _double_field(2, end_secs))
    )


def _hparams(tag: str, data: bytes) -> Any:
    return _tensor(tag, "hparams", _varint_field(1, 0) + data, tf.make_tensor_proto([], tf.float32, (0,)))


def _tensor(tag: str, plugin: str, content: bytes, tensor: Any) -> Any:
    value = tf.compat.v1.Summary.Value(tag=tag, tensor=tensor)
    value.metadata.plugin_data.plugin_name = plugin
    value.metadata.plugin_data.content = content
    return value


# The wire format of protocol buffers: https://protobuf.dev/programming-guides/encoding.


def _varint(number: int) -> bytes:
    found = bytearray()
    while number > 0x7F:
        found.append(0x80 | (number & 0x7F))
        number >>= 7
    return bytes([*found, number])


def _varint_field(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _double_field(field: int, value: float) -> bytes:
    return _varint(field << 3 | 1) + struct.pack("<d", value)


def _bytes_field(field: int, data: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(data)) + data
