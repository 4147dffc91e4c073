# SPDX-License-Identifier: Apache-2.0
"""PyTorch's DistributedDataParallel over gloo, with one thread, as its users write the loop."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from sizes import SIZES


def loop_of(size_name: str, is_independent: bool = False) -> Callable[[Any], None]:
    """Sets the process up as the worker that TF_CONFIG names.

    Args:
      size_name: a key of `sizes.SIZES`.
      is_independent: True to train without the other workers.

    Returns:
      What trains in segments, whenever `segments.Gate` lets it.
    """
    config = json.loads(os.environ["TF_CONFIG"])
    workers, index = config["cluster"]["worker"], config["task"]["index"]
    torch.set_num_threads(1)
    if not is_independent:
        how = {"init_method": f"tcp://{workers[0]}", "rank": index, "world_size": len(workers)}
        torch.distributed.init_process_group("gloo", **how)
    size = SIZES[size_name]
    widths = (size.features, *size.layers)
    layers = [
        layer
        for fan_in, fan_out in itertools.pairwise(widths)
        for layer in (torch.nn.Linear(fan_in, fan_out), torch.nn.ReLU())
    ]
    model = torch.nn.Sequential(*layers[:-1])
    if not is_independent:
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    generator = np.random.default_rng(index)
    x = torch.tensor(generator.normal(size=(size.batch, size.features)).astype("float32"))
    y = torch.tensor(generator.normal(size=(size.batch, size.layers[-1])).astype("float32"))

    def loop(gate: Any) -> None:
        while True:
            gate.enter()
            for _ in range(gate.steps):
                optimizer.zero_grad()
                loss = torch.nn.functional.mse_loss(model(x), y)
                loss.backward()
                optimizer.step()
            gate.leave()

    return loop
