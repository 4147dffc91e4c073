# SPDX-License-Identifier: Apache-2.0
"""Compares published methods of compression on equal terms: both workers of a run are simulated in one process.

python methods.py                                  # the methods at their best parameters, five seeds
python methods.py --reuse                          # only the runs that the output does not have
python methods.py --methods=demo-sign --seeds=1    # a trial of other parameters

Net, data, optimizer and first epoch are those of compressed.py. A step computes two gradients on one model, and each
worker keeps its own state. Bytes are the lengths of frames as tfdist has them: positions are in Golomb-Rice code.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import json
import math
import pathlib
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import compressed
import compression_tables
import keras
import numpy as np
import tensorflow as tf
from absl import app, flags

from tfdist import compression
from tfdist.compression import frames, gathered

WORKERS, EPOCHS, BATCH, RATE, MOMENTUM = 2, 16, 128, 0.05, 0.9
# Epochs before DGC sends its final density: the first one, and the four of its sparsity warm-up.
_SETTLED = 5
_DGC_DENSITIES = (0.25, 0.0625, 0.015625, 0.004)
# Bytes before the coded positions: a count and a tau as in Threshold, counts and the size of a value as in TopK.
_TAU_HEAD, _VALUES_HEAD = 12, 17
_STEP_OF_TAU = 2 ** (1 / 20)

Shapes = Sequence[tuple[int, ...]]


class Method:
    """Sums the workers' gradients as they are. Subclasses send less.

    `momentum` is that of the optimizer, and `rate` multiplies its learning rate. With `sign` it takes signs only.
    """

    momentum, rate, sign = MOMENTUM, 1.0, False

    def __init__(self, shapes: Shapes):
        self.sizes = [math.prod(shape) for shape in shapes]

    def begin(self, velocity: np.ndarray) -> None:
        """Takes over a worker's part of the velocity that the first epoch ends with, in units of the gradient."""

    def send(self, worker: int, gradient: np.ndarray, epoch: int) -> tuple[np.ndarray, int]:
        """Returns what a worker sends, decoded, and its bytes."""
        del worker, epoch
        return gradient, 4 * gradient.size

    def split(self, values: np.ndarray) -> list[np.ndarray]:
        """Returns the part of each variable."""
        return np.split(values, np.cumsum(self.sizes)[:-1])


class Coded(Method):
    """A codec of tfdist, with its own frames."""

    def __init__(self, shapes: Shapes, codec: gathered.GatheredCodec):
        super().__init__(shapes)
        self.codec = codec
        specs = codec.state_specs([tf.TensorSpec([size]) for size in self.sizes])
        types = {name: (spec.shape.num_elements(), spec.dtype.as_numpy_dtype) for name, spec in specs.items()}
        self.states = [{name: np.zeros(*each) for name, each in types.items()} for _ in range(WORKERS)]

    def send(self, worker: int, gradient: np.ndarray, epoch: int) -> tuple[np.ndarray, int]:
        message, self.states[worker] = self.codec.message_of(self.split(gradient), self.states[worker])
        return np.concatenate(self.codec.sum_of(message[None], self.sizes, ["worker"])), message.size


class Threshold(Coded):
    """tfdist's own, with one tau for all variables (Strom 2015)."""

    def __init__(self, shapes: Shapes, max_density: float):
        codec = compression.Threshold(min_density=max_density / 2, max_density=max_density, clip_every=None)
        super().__init__(shapes, codec)


class LayerThresholds(Method):
    """A tau for each variable, each of which sends the same fraction of its values. One frame carries all of them."""

    def __init__(self, shapes: Shapes, max_density: float):
        super().__init__(shapes)
        self._layers = [Threshold([shape], max_density) for shape in shapes]

    def send(self, worker: int, gradient: np.ndarray, epoch: int) -> tuple[np.ndarray, int]:
        pieces = zip(self._layers, self.split(gradient), strict=True)
        sent = np.concatenate([layer.send(worker, piece, epoch)[0] for layer, piece in pieces])
        positions = np.flatnonzero(sent)
        # After the first message each further tau takes 2 bits: up, down or neither.
        head = _TAU_HEAD + math.ceil(2 * (len(self.sizes) - 1) / 8)
        return sent, frame_bytes(positions, np.signbit(sent[positions]), head)


class Magnitudes(Method):
    """Adaptive threshold whose values are tau, 2 tau, 4 tau, ..., by some bits beside the sign.

    A joint of Strom 2015 with levels of 2^i, as in natural compression (Horvath et al. 2019, arXiv 1905.10988).
    """

    def __init__(self, shapes: Shapes, max_density: float, bits: int):
        super().__init__(shapes)
        self._most, self._bits = max_density * sum(self.sizes), bits
        self._taus = [0.0] * WORKERS
        self._residuals = [np.zeros(sum(self.sizes), np.float32) for _ in range(WORKERS)]

    def send(self, worker: int, gradient: np.ndarray, epoch: int) -> tuple[np.ndarray, int]:
        residual = self._residuals[worker]
        residual += gradient
        size = np.abs(residual)
        tau = self._taus[worker] or float(np.quantile(size, 1 - self._most / size.size / math.sqrt(2)))
        found = np.flatnonzero(size > tau)
        # Rounded down, so that nothing is sent that is not there.
        levels = np.minimum(np.floor(np.log2(size[found] / tau)), 2**self._bits - 1)
        sent = np.zeros_like(residual)
        sent[found] = np.copysign(tau * 2**levels, residual[found])
        residual -= sent
        change = (found.size > self._most) - (found.size < self._most / 2)
        self._taus[worker] = tau * _STEP_OF_TAU**change
        return sent, frame_bytes(found, np.signbit(sent[found]), _TAU_HEAD, self._bits)


class DGC(Coded):
    """Momentum correction, masking, local clipping and sparsity warm-up (Lin et al. 2018, arXiv 1712.01887)."""

    momentum = 0.0

    def __init__(self, shapes: Shapes, density: float, clip: float | None, warmup: bool):
        super().__init__(shapes, compression.TopK(density, momentum=MOMENTUM, values="float16"))
        self._density, self._clip, self._warmup = density, clip, warmup

    def begin(self, velocity: np.ndarray) -> None:
        for state in self.states:
            state |= {f"velocity/{index}": piece.copy() for index, piece in enumerate(self.split(velocity))}

    def send(self, worker: int, gradient: np.ndarray, epoch: int) -> tuple[np.ndarray, int]:
        is_warm = not self._warmup or epoch >= _SETTLED
        density = self._density if is_warm else _DGC_DENSITIES[epoch - 1]
        self.codec = dataclasses.replace(self.codec, density=density)
        # The gradient is this worker's part of a mean. The limit is that of its own mean.
        norm = WORKERS * float(np.linalg.norm(gradient))
        if self._clip and norm > (limit := self._clip / math.sqrt(WORKERS)):
            gradient = gradient * np.float32(limit / norm)
        return super().send(worker, gradient, epoch)


class EF21(Method):
    """The k largest differences to an estimate of the gradient (Richtarik et al. 2021, arXiv 2106.05203).

    With `averaging` below 1 the estimate is of a mean of gradients (EF21-SGDM, Fatkhullin et al. 2023, arXiv
    2305.15155). The mean is the momentum then, and the optimizer has none.
    """

    def __init__(self, shapes: Shapes, k: int, averaging: float, rate: float):
        super().__init__(shapes)
        self._k, self._averaging, self.rate = k, np.float32(averaging), rate
        self.momentum = MOMENTUM if averaging == 1 else 0.0

    def begin(self, velocity: np.ndarray) -> None:
        # All workers know the mean gradient at the end of the first epoch.
        self._means, self._estimates = ([(1 - MOMENTUM) * velocity for _ in range(WORKERS)] for _ in range(2))

    def send(self, worker: int, gradient: np.ndarray, epoch: int) -> tuple[np.ndarray, int]:
        mean, estimate = self._means[worker], self._estimates[worker]
        mean += self._averaging * (gradient - mean)
        difference = mean - estimate
        found = np.sort(np.argpartition(np.abs(difference), -self._k)[-self._k :])
        estimate[found] += difference[found].astype(np.float16)
        return estimate, frame_bytes(found, None, _VALUES_HEAD, 16)


class DeMo(Method):
    """The k largest components of each chunk's cosine transform (Peng et al. 2024, arXiv 2411.19870).

    They are of the worker's momentum, and leave it. A chunk has at most 64 rows and 64 columns.
    """

    momentum = 0.0

    def __init__(self, shapes: Shapes, k: int, decay: float, rate: float, sign: bool):
        super().__init__(shapes)
        self._k, self._decay, self.rate, self.sign = k, np.float32(decay), rate, sign
        # A kernel is a matrix, and a bias a row.
        self._matrices = [(math.prod(shape[:-1]), shape[-1]) for shape in shapes]

    def begin(self, velocity: np.ndarray) -> None:
        self._momenta = [velocity.copy() for _ in range(WORKERS)]

    def send(self, worker: int, gradient: np.ndarray, epoch: int) -> tuple[np.ndarray, int]:
        momentum, first, found, sent = self._momenta[worker], 0, [], []
        momentum *= self._decay
        momentum += gradient
        for piece, (rows, columns) in zip(self.split(momentum), self._matrices, strict=True):
            # The largest divisors of at most 64.
            high, wide = (max(each for each in range(1, 65) if size % each == 0) for size in (rows, columns))
            chunks = piece.reshape(rows // high, high, columns // wide, wide).swapaxes(1, 2)
            flat = (_cosines(high) @ chunks @ _cosines(wide).T).reshape(-1, high * wide)
            kept = np.argpartition(np.abs(flat), -self._k)[:, -self._k :]
            values = np.zeros_like(flat)
            np.put_along_axis(values, kept, np.take_along_axis(flat, kept, 1).astype(np.float16), 1)
            found.append(np.flatnonzero(values) + first)
            back = _cosines(high).T @ values.reshape(chunks.shape) @ _cosines(wide)
            sent.append(back.swapaxes(1, 2).reshape(-1))
            first += piece.size
        whole = np.concatenate(sent)
        momentum -= whole
        return whole, frame_bytes(np.concatenate(found), None, _VALUES_HEAD, 16)


@functools.cache
def _cosines(size: int) -> np.ndarray:
    """Returns the orthonormal matrix of the cosine transform, a component in each row."""
    matrix = math.sqrt(2 / size) * np.cos(np.pi / size * np.outer(np.arange(size), np.arange(size) + 0.5))
    matrix[0] /= math.sqrt(2)
    return matrix.astype(np.float32)


def frame_bytes(positions: np.ndarray, negative: np.ndarray | None, head: int, bits: int = 0) -> int:
    """Returns the length of a frame of ascending positions, with signs or without, and so many bits for each value."""
    signs = np.zeros_like(positions) if negative is None else negative
    coded = frames.encode(2 * positions + signs, has_signs=negative is not None)
    return frames.HEADER_BYTES + head + coded.size + math.ceil(positions.size * bits / 8)


# The methods of the table, by name.
METHODS = {
    "none": functools.partial(Method),
    "threshold": functools.partial(Threshold, max_density=0.002),
    "per-layer": functools.partial(LayerThresholds, max_density=0.002),
    "magnitudes": functools.partial(Magnitudes, max_density=0.002, bits=1),
    "dgc": functools.partial(DGC, density=0.00095, clip=3.0, warmup=True),
    "dgc-at-once": functools.partial(DGC, density=0.00095, clip=3.0, warmup=False),
    "ef21-mean": functools.partial(EF21, k=88, averaging=0.1, rate=10.0),
    "demo": functools.partial(DeMo, k=3, decay=0.999, rate=10.0, sign=False),
}
# Other parameters, each tried with the first seed.
TRIALS = {
    "magnitudes-4": functools.partial(Magnitudes, max_density=0.002, bits=2),
    "dgc-clipped": functools.partial(DGC, density=0.00095, clip=1.0, warmup=True),
    "dgc-unclipped": functools.partial(DGC, density=0.00095, clip=None, warmup=True),
    "dgc-at-once-clipped": functools.partial(DGC, density=0.00095, clip=1.0, warmup=False),
    "ef21": functools.partial(EF21, k=92, averaging=1.0, rate=1.0),
    "ef21-mean-more": functools.partial(EF21, k=92, averaging=0.1, rate=10.0),
    "demo-sign": functools.partial(DeMo, k=3, decay=0.999, rate=0.02, sign=True),
}
ALL: dict[str, functools.partial[Method]] = {**METHODS, **TRIALS}
flags.DEFINE_multi_enum("methods", list(METHODS), list(ALL), "Which of METHODS and TRIALS.")
flags.DEFINE_multi_integer("seeds", [1, 2, 3, 4, 5], "Of the initial weights and the order of the examples.")
flags.DEFINE_boolean("reuse", False, "Keep the runs of the same parameters and seed that the output has.")
flags.DEFINE_string("output", str(pathlib.Path(__file__).parent / "results" / "methods.json"), "Where results go.")
FLAGS = flags.FLAGS


def title(name: str) -> str:
    """Returns the class of a method and its parameters."""
    shown = ", ".join(f"{key}={value!r}" for key, value in ALL[name].keywords.items())
    return f"{getattr(ALL[name].func, '__name__', name)}({shown})" if shown else "uncompressed"


def train(name: str, seed: int) -> dict[str, Any]:
    """Trains once; returns accuracy and bytes, which are fractions of float32."""
    keras.utils.set_random_seed(seed)
    training, held_out = compressed.digits.load_data(BATCH, seed)
    model = compressed.digits.make_model()
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    variables = [variable.value for variable in model.trainable_variables]
    method = ALL[name]([tuple(variable.shape) for variable in variables])

    @tf.function
    def gradient_of(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        return tf.concat([tf.reshape(each, [-1]) for each in tape.gradient(loss, variables)], 0)

    @tf.function
    def add(changes: tf.Tensor) -> None:
        for variable, change in zip(variables, tf.split(changes, method.sizes), strict=True):
            variable.assign_add(tf.reshape(change, variable.shape))

    full = sum(method.sizes)
    velocity, rate, step, shares = np.zeros(full, np.float32), RATE, 0, np.zeros([EPOCHS, len(training)])
    for epoch in range(EPOCHS):
        if epoch == 1:
            method.begin(-velocity / np.float32(WORKERS * rate))
        for batch, (x, y) in enumerate(training):
            rate = RATE * (1 + math.cos(math.pi * step / shares.size)) / 2
            halves = list(zip(tf.split(x, WORKERS), tf.split(y, WORKERS), strict=True))
            if epoch == 0:
                velocity = MOMENTUM * velocity - rate * gradient_of(*halves[0]).numpy()
            else:
                gradients = [gradient_of(*half).numpy() / WORKERS for half in halves]
                sent = [method.send(worker, gradient, epoch) for worker, gradient in enumerate(gradients)]
                total = sum(values for values, _ in sent)
                total = np.sign(total) if method.sign else total
                velocity = method.momentum * velocity - rate * method.rate * total
                shares[epoch, batch] = statistics.mean(size for _, size in sent) / (4 * full)
            add(velocity.astype(np.float32))
            step += 1
    right = [np.argmax(model(x), 1) == y for x, y in compressed.with_shifts(held_out).as_numpy_iterator()]
    return {
        "method": title(name),
        "seed": seed,
        "accuracy": float(np.mean(np.concatenate(right))),
        "share": float(shares[1:].mean()),
        "settled_share": float(shares[_SETTLED:].mean()),
    }


def table(runs: Sequence[dict[str, Any]]) -> str:
    """Returns a line for each method, over its seeds that have an uncompressed run."""
    plain = {run["seed"]: run["accuracy"] for run in runs if run["method"] == "uncompressed"}
    lines = [
        "| Method | seeds | of float32 | after epoch 5 | accuracy, mean | range | points behind, mean | worst |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for method in map(title, ALL):
        rows = [run for run in runs if run["method"] == method and run["seed"] in plain]
        if not rows:
            continue
        shares = [statistics.mean(row[key] for row in rows) for key in ("share", "settled_share")]
        accuracies = [row["accuracy"] for row in rows]
        behind = [100 * (plain[row["seed"]] - row["accuracy"]) for row in rows]
        lines.append(
            f"| {method} | {len(rows)} | {' | '.join(map(compression_tables.ratio, shares))} | "
            f"{statistics.mean(accuracies):.2%} | {min(accuracies):.2%} to {max(accuracies):.2%} | "
            f"{statistics.mean(behind):.2f} | {max(behind):.2f} |"
        )
    return "\n".join(lines)


def main(argv: list[str]) -> None:
    if argv[1:]:
        raise app.UsageError(f"methods.py takes flags only. Received: {' '.join(argv[1:])}")
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    output = pathlib.Path(FLAGS.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    runs = json.loads(output.read_text())["runs"] if output.exists() else []
    found = {(run["method"], run["seed"]): run for run in runs}
    versions = {name: importlib.metadata.version(name) for name in ("tensorflow", "keras", "numpy", "scikit-learn")}
    for seed in FLAGS.seeds:
        for name in FLAGS.methods:
            if not FLAGS.reuse or (title(name), seed) not in found:
                found[title(name), seed] = run = train(name, seed)
                print(json.dumps(run), flush=True)
                command = " ".join(["python methods.py", *sys.argv[1:]])
                report = {"command": command, "versions": versions, "runs": list(found.values())}
                part = output.with_name(f"{output.name}.part")
                part.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
                part.replace(output)
    print(table(list(found.values())))


if __name__ == "__main__":
    try:
        app.run(main)
    except KeyboardInterrupt:
        sys.exit("\ninterrupted; the output has all runs that ended")
