# SPDX-License-Identifier: Apache-2.0
"""Speed and size of codecs on one core: `python benchmarks/codec_speed.py`. Writes results/codecs.json.

Each row is a `tf.function` as an engine has it: the state is in variables. Speeds are in GB/s of float32 gradients in,
sizes in times less than float32. Bits per entry include the message's header, and the values of TopK; the entropy is
that of a gap and a sign at random positions.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pathlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

_RESULTS = pathlib.Path(__file__).parent / "results" / "codecs.json"
# Steps until all memory has been touched: a first touch of 100 MB may take half a second.
_WARMUP = 5
_DENSITIES = (1e-4, 1e-3, 1e-2)


def measure(num_values: int, rounds: int) -> list[dict[str, Any]]:
    """Measures each codec.

    Args:
      num_values: of one gradient.
      rounds: steps of each row that count.
    """
    rows = []
    for codec, density in _codecs():
        rows.append(_row(codec, density, num_values, rounds))
        print(_line(rows[-1]), flush=True)
    return rows


def limits(num_values: int, rounds: int) -> dict[str, float]:
    """Returns GB/s of what no codec with a residual does without: a sum of two arrays, and zeros to decode into."""
    a, b, out = (np.zeros(num_values, np.float32) for _ in range(3))
    found = {}
    for name, function in (("sum", lambda: np.add(a, b, out=out)), ("zeros", lambda: out.fill(0.0))):
        function()
        start = time.perf_counter()
        for _ in range(rounds):
            function()
        found[name] = 4e-9 * num_values * rounds / (time.perf_counter() - start)
    return found


def _codecs() -> Iterator[tuple[Any, float]]:
    from tfdist.compression import HalfPrecision, PowerSGD, SignSGD, Threshold, TopK

    for density in (*_DENSITIES, 0.5):
        yield Threshold(0.999), density
    for density in _DENSITIES:
        yield TopK(density), density
    yield TopK(1e-3, momentum=0), 1e-3
    for codec in (SignSGD(), HalfPrecision("float16"), HalfPrecision("bfloat16"), PowerSGD(4)):
        yield codec, 1.0


def _gradients(density: float, num_values: int) -> list[np.ndarray]:
    """Returns two gradients by turns: noise, with values of 1 and -1 at this density."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(2):
        gradient = rng.standard_normal(num_values, np.float32) * np.float32(1e-4)
        positions = np.flatnonzero(rng.random(num_values, np.float32) < density)
        gradient[positions] += rng.choice(np.array([-1, 1], np.float32), positions.size)
        found.append(gradient.reshape(-1, 5000))
    return found


def _row(codec: Any, density: float, num_values: int, rounds: int) -> dict[str, Any]:
    import tensorflow as tf

    from tfdist.compression import LocalTransport, PowerSGD

    gradients = [tf.constant(gradient) for gradient in _gradients(density, num_values)]
    spec = tf.TensorSpec(gradients[0].shape)
    state = {name: tf.Variable(value) for name, value in codec.init([spec]).items()}

    @tf.function(autograph=False)
    def encode(gradient: tf.Tensor) -> tf.Tensor:
        old = {name: variable.read_value() for name, variable in state.items()}
        if isinstance(codec, PowerSGD):
            (result,), new = codec.exchange([gradient], old, LocalTransport())
        else:
            result, new = codec.encode([gradient], old)
        for name, variable in state.items():
            variable.assign(new[name])
        return result

    @tf.function(autograph=False, reduce_retracing=True)
    def decode(message: tf.Tensor) -> tf.Tensor:
        if codec.commutes_with_sum:
            return codec.decode(message, [spec])[0]
        return codec.decode(message[tf.newaxis], [spec], ["worker:0"])[0]

    encode_secs, decode_secs, total = [], [], None
    for number in range(rounds + _WARMUP):
        gradient = gradients[number % 2]
        encoded, message = _timed(lambda gradient=gradient: encode(gradient))
        decoded, total = (
            _timed(lambda message=message: decode(message)) if not isinstance(codec, PowerSGD) else (0.0, 0)
        )
        if number >= _WARMUP:
            encode_secs.append(encoded)
            decode_secs.append(decoded)
    num_bytes = message.shape[0] * message.dtype.size if not isinstance(codec, PowerSGD) else 16 * sum(spec.shape)
    entries = int(np.count_nonzero(total)) if total is not None and density < 1 else 0
    gigabytes = 4e-9 * num_values
    encoded, decoded = statistics.mean(encode_secs), statistics.mean(decode_secs)
    return {
        "codec": repr(codec),
        "density": density,
        "encode_gb_per_sec": gigabytes / encoded,
        "decode_gb_per_sec": gigabytes / decoded if decoded else None,
        "both_gb_per_sec": gigabytes / (encoded + decoded),
        "bytes": num_bytes,
        "ratio": 4 * num_values / num_bytes,
        "bits_per_entry": 8 * num_bytes / entries if entries else None,
        "entropy": _entropy_bits(entries / num_values) if entries else None,
        "encode_secs": encode_secs,
        "decode_secs": decode_secs,
    }


def _entropy_bits(density: float) -> float:
    """Returns the entropy of one gap and its sign at random positions of this density, in bits."""
    return 1 - math.log2(density) - (1 - density) / density * math.log2(1 - density)


def _timed(function: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = function()
    # Eager results of a tf.function are there when it returns on CPUs; this makes sure of it.
    result.numpy()
    return time.perf_counter() - start, result


def _line(row: dict[str, Any]) -> str:
    decoded, bits, entropy = row["decode_gb_per_sec"], row["bits_per_entry"], row["entropy"]
    return (
        f"{row['codec']:24} {row['density']:<7g} {row['encode_gb_per_sec']:7.2f} "
        f"{decoded or float('nan'):7.2f} {row['both_gb_per_sec']:7.2f} {row['ratio']:9.1f} "
        f"{bits or float('nan'):7.2f} {entropy or float('nan'):7.2f}"
    )


def main() -> None:
    """Prints a table and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--values", type=int, default=25_000_000)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--output", type=pathlib.Path, default=_RESULTS)
    flags = parser.parse_args()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    from tfdist import _machine

    _machine.keep_freed_memory()
    print("codec                    density  encode  decode    both    x less    bits entropy")
    most = limits(flags.values, flags.rounds)
    together = 1 / (1 / most["sum"] + 1 / most["zeros"])
    print(f"sum, zeros               1       {most['sum']:7.2f} {most['zeros']:7.2f} {together:7.2f}", flush=True)
    rows = measure(flags.values, flags.rounds)
    flags.output.write_text(
        json.dumps({"values": flags.values, "cores": 1, "limits": most, "rows": rows}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
