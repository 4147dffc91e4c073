# SPDX-License-Identifier: Apache-2.0
"""Each engine of the all-reduce strategies has the protocol that data sets and strategies go by."""

from __future__ import annotations

import inspect

import pytest

from tfdist.engines.averaging.engine import AveragingEngine
from tfdist.engines.base import Engine
from tfdist.engines.mirrored.engine import ThreadedEngine
from tfdist.engines.multi_worker.engine import QuorumEngine
from tfdist.engines.warmup.engine import WarmupEngine


@pytest.mark.devices
@pytest.mark.parametrize("engine", [AveragingEngine, ThreadedEngine, QuorumEngine, WarmupEngine])
def test_engine_methods_have_the_parameters_of_the_protocol(engine: type):
    assert issubclass(engine, Engine)
    for name in ("open", "run"):
        wanted, found = inspect.signature(getattr(Engine, name)), inspect.signature(getattr(engine, name))
        assert list(found.parameters) == list(wanted.parameters)
