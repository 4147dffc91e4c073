# SPDX-License-Identifier: Apache-2.0
"""A model of synchronous data-parallel throughput with few parameters, calibrated on the first rows of a table.

With r the throughput of one device, b examples of a device in each step, s = (bytes of gradients) r / b the bytes per
second that one device produces, d devices of a machine in use, M machines and p = d M devices in all, a step takes
(1 + x) b / r seconds, with

    x = a_model                            start of kernels and synchronisation, once there are two devices
      + k s 2 (d - 1) / d                  ring all-reduce between the devices of a machine
      + c s (d - 1)                        a path that all devices of a machine share, such as its host's memory
      + i r / r_median (d - 1)             what the host does for each example, such as reading it
      + j E[max of p standard normals]     unequal steps: the last device ends the step
      + max(0, s (M + S - 2) / S / B - h)  sum between machines with links of B bytes per second and S parameter servers
                                           beside the workers, h of a step hidden behind the backward pass. S = M is a
                                           ring all-reduce, too: 2 (M - 1) / M
      + o                                  once there are two machines: the last gradients, which nothing hides
      + q s (M - 1) / B_usual              a path that all machines share, such as a parameter server

a, k, c, i, j, o and q are at least 0 and found by least squares with Gaussian priors (`PRIORS`); k, c, i, j, o, q, B
and h are those of the cluster, so all models of a table share them. B and h are averaged over a grid (`_links`), whose
prior is what is known of the network; rows on one machine say nothing about them, so the prediction then rests on the
prior. A table may have b and S, and a link, which is the most that B can be. Without them S is M, and b is between the
same for all models, and such that steps of all models take equally long.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence

import numpy as np
from scipy import optimize, special

BYTES_PER_PARAMETER = 4
# Standard deviations: of the measured throughputs (relative), and of the priors. A prior of 1 / (GB/s) means that a
# path of that bandwidth would be no surprise.
NOISE = 0.01
PRIORS = {"overhead": 0.04, "overhead_of_model": 0.03, "ring": 0.2e-9, "host": 0.05e-9}
PRIORS |= {"input": 0.005, "jitter": 0.01, "last": 0.05, "server": 0.01}
# About two thirds of a step are the backward pass, during which gradients can be sent.
BACKWARD = 2 / 3
# Factors of the link's bandwidth, with their prior probabilities, and the shares of the backward pass that hide
# communication.
_FACTORS = np.exp2(np.arange(-14, 9) / 2)
_OVERLAPS = (0.0, 0.25, 0.5, 0.75, 1.0)
# Batch sizes are in proportion to this power of the model's throughput.
_POWERS = (0.0, 0.25, 0.5, 0.75, 1.0)
# What a network is built of, in bytes per second: 10 to 400 Gbit/s.
_USUAL = tuple(gbits * 0.125e9 for gbits in (10, 25, 50, 100, 200, 400))
_DRAWS = 2000
_SWEEPS = 150
DEFAULT_BATCH = 64


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of a table; `images_per_sec` is of all devices together, and the last three are 0 if unknown."""

    devices: int
    devices_per_machine: int
    model: str
    parameters_millions: float
    images_per_sec: float
    batch_per_device: float = 0
    servers: float = 0
    network_gbits: float = 0

    @property
    def local(self) -> int:
        """Devices of a machine in use."""
        return min(self.devices, self.devices_per_machine)

    @property
    def machines(self) -> float:
        """Machines, as a fraction if the last one is not full."""
        return self.devices / self.local


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Throughput of a row as predicted: images per second, and the bounds of its 90 % interval."""

    predicted: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class Assumptions:
    """Assumptions about what a table does not say.

    Attributes:
      batch_per_device: examples of a device in each step; 0 if unknown: about `DEFAULT_BATCH` of the median model.
      network: bytes per second that a machine's link carries, in each direction; 0 for up to what the rows say. If they
        say nothing: the slowest usual link, from 10 Gbit/s on, that the overlap hides for the median model, because who
        publishes a table has a cluster fit for it.
      overlap: share of the backward pass that hides communication between machines.
    """

    batch_per_device: float = 0
    network: float = 0
    overlap: float = 0.75


class Calibration:
    """The model, fitted to rows of one or several models.

    Args:
      rows: the rows to calibrate on, in any order.
      assumptions: what the rows don't say.
    """

    def __init__(self, rows: Sequence[Row], assumptions: Assumptions) -> None:
        self._assumptions = assumptions
        smallest = {row.model: row for row in sorted(rows, key=lambda row: -row.devices)}
        self.models = sorted(smallest)
        self._single = {model: row.images_per_sec / row.devices for model, row in smallest.items()}
        self._middle = float(np.median(list(self._single.values())))
        published = 0.125e9 * max(row.network_gbits for row in rows)
        self.network = assumptions.network or published or self._usual_network(smallest.values())
        most = 1.0 if published and not assumptions.network else math.inf
        self._links = _links(self.network, assumptions.overlap, most)
        # Without a row of one device, its throughput is what makes the smallest row fit.
        for _ in range(1 if all(row.devices == 1 for row in smallest.values()) else 6):
            self._draws = self._posterior(rows)
            for model, row in smallest.items():
                self._single[model] = row.images_per_sec / row.devices * (1 + float(np.median(self._slowdowns(row))))

    def predict(self, row: Row) -> Prediction:
        """Predicts the throughput of a row, from its devices and its model: median and 90 % of the posterior.

        Raises:
          KeyError: no row of the model was calibrated on.
        """
        slowdowns = self._slowdowns(row)
        noise = 1 + NOISE * np.random.default_rng(1).standard_normal(len(slowdowns))
        low, middle, high = np.quantile(
            self._single[row.model] * row.devices / (1 + slowdowns) * noise, [0.05, 0.5, 0.95]
        )
        return Prediction(float(middle), float(low), float(high))

    def limit(self, row: Row) -> float:
        """Returns the throughput beyond which 4,096 such machines don't bring the model of this row."""
        return self.predict(dataclasses.replace(row, devices=row.devices_per_machine * 4096, servers=0)).predicted

    def _usual_network(self, rows: Iterable[Row]) -> float:
        produced = float(np.median([self._produced(row, 0.5) for row in rows]))
        needed = 2 * produced / (self._assumptions.overlap * BACKWARD)
        return next((usual for usual in _USUAL if usual >= needed), _USUAL[-1])

    def _batch(self, row: Row, power: float) -> float:
        given = self._assumptions.batch_per_device or row.batch_per_device
        return given or DEFAULT_BATCH * (self._single[row.model] / self._middle) ** power

    def _produced(self, row: Row, power: float) -> float:
        """Bytes of gradients that one device produces per second, if nothing holds it up."""
        gradients = BYTES_PER_PARAMETER * 1e6 * row.parameters_millions
        return gradients * self._single[row.model] / self._batch(row, power)

    def _features(self, row: Row, power: float) -> np.ndarray:
        several, produced = float(row.devices > 1), self._produced(row, power)
        own = [several * (row.model == model) for model in self.models]
        ring, shared = produced * 2 * (row.local - 1) / row.local, produced * (row.local - 1)
        examples = self._single[row.model] / self._middle * (row.local - 1)
        between = produced * (row.machines - 1) / self.network
        return np.array(
            [*own, several, ring, shared, examples, largest_of(row.devices), float(row.machines > 1), between]
        )

    def _exposed(self, row: Row, power: float) -> np.ndarray:
        """The sum between machines that is not hidden, as a share of a step: one number for each link."""
        bandwidth, hidden, _ = self._links.T
        servers = min(row.servers or row.machines, row.machines)
        sent = self._produced(row, power) * (row.machines + servers - 2) / servers
        return np.maximum(0.0, sent / bandwidth - hidden)

    def _slowdowns(self, row: Row) -> np.ndarray:
        each = [
            self._exposed(row, power)[links] + parameters @ self._features(row, power)
            for power, links, parameters in self._draws
        ]
        return np.concatenate(each)

    def _posterior(self, rows: Sequence[Row]) -> list[tuple[float, np.ndarray, np.ndarray]]:
        """Draws from the distribution of everything unknown, given the rows.

        Returns:
          For each power of the batch sizes: links, as indices [draws], and parameters [draws, parameters].
        """
        several = [row for row in rows if row.devices > 1]
        is_known = self._assumptions.batch_per_device or all(row.batch_per_device for row in rows)
        powers = (0.5,) if is_known or len(self.models) == 1 else _POWERS
        problems = [self._problem(several, power) for power in powers]
        logs = np.array([self._links[:, 2] - problem.cost / 2 for problem in problems])
        weights = np.exp(logs - logs.max()).ravel()
        random = np.random.default_rng(0)
        chosen = random.choice(weights.size, _DRAWS, p=weights / weights.sum())
        draws = []
        for index, (power, problem) in enumerate(zip(powers, problems, strict=True)):
            links = chosen[chosen // len(self._links) == index] % len(self._links)
            drawn = positive_normals(problem.precision, problem.right[links], problem.best[links], random)
            draws.append((power, links, drawn * self._deviations()))
        return draws

    def _deviations(self) -> np.ndarray:
        names = ["overhead", "ring", "host", "input", "jitter", "last", "server"]
        return np.array([PRIORS[name] for name in ["overhead_of_model"] * len(self.models) + names])

    def _problem(self, rows: Sequence[Row], power: float) -> _Problem:
        """The least squares of each link, in units of the standard deviations, so that all equations weigh the same."""
        deviations = self._deviations()
        slowdown = np.array([self._single[row.model] * row.devices / row.images_per_sec for row in rows])
        noise = NOISE * np.maximum(slowdown, 1.0)
        exposed = np.array([self._exposed(row, power) for row in rows]).reshape(len(rows), len(self._links)).T
        design = np.array([self._features(row, power) * deviations for row in rows]).reshape(len(rows), len(deviations))
        design, targets = design / noise[:, None], (slowdown - 1 - exposed) / noise
        with_priors, none = np.vstack([design, np.eye(len(deviations))]), np.zeros(len(deviations))
        best = np.array([optimize.nnls(with_priors, np.append(target, none))[0] for target in targets])
        cost = np.sum((best @ design.T - targets) ** 2, axis=1) + np.sum(best**2, axis=1)
        return _Problem(with_priors.T @ with_priors, targets @ design, best, cost)


@dataclasses.dataclass(frozen=True)
class _Problem:
    """Least squares with Gaussian priors: x' P x / 2 - r' x, the r, the best x and its cost of each link."""

    precision: np.ndarray
    right: np.ndarray
    best: np.ndarray
    cost: np.ndarray


def positive_normals(
    precision: np.ndarray, right: np.ndarray, start: np.ndarray, random: np.random.Generator
) -> np.ndarray:
    """Draws from the densities proportional to exp(r' x - x' P x / 2) for x >= 0, by Gibbs sampling.

    Args:
      precision: P [n, n], positive definite.
      right: r [draws, n], of each draw.
      start: where the chain of each draw begins, [draws, n].
      random: the source of random numbers.
    """
    x = start.copy()
    for _ in range(_SWEEPS):
        for index in range(x.shape[1]):
            scale = 1 / math.sqrt(precision[index, index])
            mean = (right[:, index] - x @ precision[:, index]) * scale**2 + x[:, index]
            # A normal number above 0, by its distribution function; -mean is below 0, where that is accurate.
            tail = special.ndtr(mean / scale)
            x[:, index] = mean - scale * special.ndtri(tail * (1 - random.random(len(x))))
    return np.maximum(x, 0.0)


def _links(network: float, overlap: float, most: float) -> np.ndarray:
    """Returns, of each grid point, bytes per second, hidden share of a step and logarithm of the prior probability."""
    links = []
    # Software reaches no more than the link has. TensorFlow's gRPC moved 0.1 to 0.8 GB/s over links of 10 Gbit/s in
    # 2017 (tensorflow/tensorflow, issue 6116).
    for factor in _FACTORS[most >= _FACTORS]:
        for share in _OVERLAPS:
            # One standard deviation is a factor of 2 in the bandwidth, and a quarter in the overlap.
            prior = -(math.log2(factor) ** 2) / 2 - ((share - overlap) / 0.25) ** 2 / 2
            links.append((network * float(factor), share * BACKWARD, prior))
    return np.array(links)


@functools.cache
def largest_of(count: int) -> float:
    """Returns the expected maximum of `count` standard normal numbers; 0 for one number.

    By the integral of 1 - F(x)^count - (1 - F(x))^count over x > 0, with F the distribution function.
    """
    x = np.linspace(0.0, 9.0, 4001)
    below = 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
    values = 1 - below**count - (1 - below) ** count
    return float(np.sum((values[1:] + values[:-1]) / 2 * np.diff(x)))
