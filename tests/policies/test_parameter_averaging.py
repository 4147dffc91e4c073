# SPDX-License-Identifier: Apache-2.0
"""ParameterAveraging takes what makes sense, and says what does not."""

from __future__ import annotations

from typing import Any

import pytest

from tfdist.policies import composition
from tfdist.policies.parameter_averaging import ParameterAveraging


class Outer:
    """Stands for an outer optimizer, with the attributes that are needed."""

    def apply(self) -> None: ...

    def get_config(self) -> dict[str, Any]:
        return {}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Outer:
        return cls(**config)


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ({"every_steps": 16}, "ParameterAveraging(every_steps=16)"),
        (
            {"every_steps": 1, "optimizer_state": "reset", "outer": Outer()},
            "ParameterAveraging(every_steps=1, optimizer_state='reset', outer=Outer(...))",
        ),
        ({"every_steps": 2, "outer": lambda: Outer()}, "ParameterAveraging(every_steps=2, outer=<lambda>(...))"),
    ],
)
def test_it_shows_what_it_was_given(arguments: dict[str, Any], shown: str):
    assert repr(ParameterAveraging(**arguments)) == shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"every_steps": 0}, "must be an integer of at least 1. Received: every_steps=0"),
        ({"every_steps": 2.0}, "Received: every_steps=2.0"),
        ({"every_steps": True}, "Received: every_steps=True"),
        ({"every_steps": "16"}, "Received: every_steps='16'"),
        ({"every_steps": 4, "optimizer_state": "mean"}, "'average', 'local', 'reset'. Received:"),
        ({"every_steps": 4, "outer": "sgd"}, "Received: outer='sgd'"),
        ({"every_steps": 4, "outer": None}, "Received: outer=None"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: dict[str, Any], message: str):
    with pytest.raises(ValueError, match="ParameterAveraging") as error:
        ParameterAveraging(**arguments)
    assert message in str(error.value)


def test_each_model_gets_an_outer_optimizer_of_its_own():
    given = Outer()
    made = ParameterAveraging(2, outer=given).make_outer()
    assert isinstance(made, Outer) and made is not given
    assert isinstance(ParameterAveraging(2, outer=Outer).make_outer(), Outer)
    with pytest.raises(ValueError, match=r"must return a Keras optimizer\. Received: 7"):
        ParameterAveraging(2, outer=lambda: 7).make_outer()


def test_on_several_workers_the_outer_optimizer_is_made_after_the_strategy():
    with pytest.raises(ValueError, match=r"give a function that makes the optimizer, such as outer=lambda: Outer"):
        composition.compose([ParameterAveraging(2, outer=Outer())], "MultiWorkerMirroredStrategy", 2)
    composition.compose([ParameterAveraging(2, outer=Outer)], "MultiWorkerMirroredStrategy", 2)
    composition.compose([ParameterAveraging(2, outer=Outer())], "MirroredStrategy", 2)


def test_there_must_be_somebody_to_average_with():
    with pytest.raises(ValueError, match=r"needs a second replica.*Received: total_num_replicas=1"):
        composition.compose([ParameterAveraging(2)], "MirroredStrategy", 1)
    assert composition.compose([ParameterAveraging(2)], "MirroredStrategy", 2).averaging is not None
