# SPDX-License-Identifier: Apache-2.0
"""Compatibility rules of policies with strategies and with each other.

`docs/policies.md` shows the same rules as a table, and a test compares the two.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from tfdist.policies.asynchronous import Asynchronous
from tfdist.policies.base import Aggregation, Policy
from tfdist.policies.compression import Compression
from tfdist.policies.lazy_rows import LazyRows
from tfdist.policies.parameter_averaging import ParameterAveraging
from tfdist.policies.staleness import BoundedStaleness, DropStale, SoftSync, StalenessScaling
from tfdist.policies.warmup import Warmup

_STALENESS = (SoftSync, StalenessScaling, DropStale, BoundedStaleness)
# Kinds of policies that strategies know; a policy of your own derives from one of them.
_KINDS = (Aggregation, Warmup, ParameterAveraging, Compression, LazyRows, *_STALENESS)
PARAMETER_SERVER = "ParameterServerStrategy"
MULTI_WORKER = "MultiWorkerMirroredStrategy"

# Reasons why a strategy refuses a policy, each with the alternative.
_WITHOUT_STALENESS = (
    "all replicas update at once there, so that no gradient is ever stale; against stragglers use "
    "tfdist.BackupWorkers(spares=...), or tfdist.ParameterServerStrategy"
)
_WITHOUT_AVERAGING = (
    "its workers have no variables of their own, which could be averaged; use tfdist.SoftSync(updates=...), or "
    "tfdist.MultiWorkerMirroredStrategy"
)
_WITHOUT_MESSAGES = (
    "its replicas send no gradients over a network, which could be encoded; use tfdist.MultiWorkerMirroredStrategy, "
    "or tfdist.ParameterServerStrategy"
)
_WITHOUT_TABLES = (
    "each of its replicas has the whole table and updates it densely; use tfdist.ParameterServerStrategy, or leave it "
    "away"
)
# Reasons why two policies exclude each other.
_ONE_OF_A_KIND = "there can be only one of a kind; leave one away"
_IN_STEP = "the first one keeps all gradients of an update in step, so that none is ever stale; use one or the other"
_ALONE = "with the first one the replicas send no gradients that an update could be made of; use one or the other"
# Policies beside which gradients can't be transformed under a strategy, each with the reason.
_WITHOUT_TRANSFORMS = {
    Warmup: "while one replica trains alone, the others' state of the transforms would stand still; give the optimizer "
    "a clipnorm, or leave one away",
    ParameterAveraging: "its replicas send parameters, and no gradients; give the optimizer a clipnorm, or leave one "
    "away",
}
# The policy that "the first one" means in each reason.
_FIRST = {_IN_STEP: Aggregation, _ALONE: ParameterAveraging, _ONE_OF_A_KIND: Policy}


@dataclasses.dataclass(frozen=True)
class Composition:
    """The policies of one strategy, by role.

    Attributes:
      aggregation: decides which gradients form each update; None leaves that to the strategy.
      warmup: limits the replicas at the start of training; None if all replicas train from the start.
      averaging: sets when parameters are averaged; None for never.
      compression: how gradients are encoded; None to send them as they are.
      is_lazy: True if an update touches only the rows of a table that have a gradient.
    """

    aggregation: Aggregation | None = None
    warmup: Warmup | None = None
    averaging: ParameterAveraging | None = None
    compression: Compression | None = None
    is_lazy: bool = False


def check_policies(
    policies: Iterable[Any] | None, strategy: str, transforms: Sequence[Any] = (), devices_per_replica: int = 1
) -> tuple[Policy, ...]:
    """Checks a list of policies before any work starts.

    Args:
      policies: the user's argument; None for no policies.
      strategy: the strategy's name, such as "MirroredStrategy".
      transforms: the gradient transforms beside them.
      devices_per_replica: argument of the strategy, checked by itself.

    Returns:
      The policies.

    Raises:
      ValueError: an element is no policy, or is not compatible with the strategy, with another policy, with gradient
        transforms, or with `devices_per_replica`.
    """
    policies = () if policies is None else policies
    is_list = isinstance(policies, Iterable) and not isinstance(policies, str)
    given: tuple[Any, ...] = tuple(policies) if is_list else (policies,)
    if not is_list or not all(isinstance(policy, Policy) for policy in given):
        codecs = [f"Compression({each!r})" for each in given if hasattr(each, "exchange")]
        classes = [f"{each.__name__}(...)" for each in given if isinstance(each, type)]
        example = [*classes, *codecs, "BackupWorkers(spares=1)"][0]
        raise ValueError(f"policies must be a list of policies such as [{example}]. Received: policies={policies!r}")
    policies = given
    for policy in policies:
        policy.check_made()  # Before its text is made.
    received = f"Received: policies={list(policies)!r}"
    for policy in policies:
        if not isinstance(policy, _KINDS):
            raise ValueError(
                f"policies: {policy!r} is of no kind that a strategy asks; derive it from one of "
                f"{', '.join(kind.__name__ for kind in _KINDS)}. {received}"
            )
        if reason := refusal(type(policy), strategy):
            raise ValueError(f"policies: {policy!r} does not go with {strategy}: {reason}. {received}")
        if isinstance(policy, Compression) and policy.variables and strategy != PARAMETER_SERVER:
            raise ValueError(
                f"policies: {policy!r}: variables=... is for ParameterServerStrategy; the workers of {strategy} have "
                f"their own, so leave it away. {received}"
            )
    for index, first in enumerate(policies):
        for second in policies[index + 1 :]:
            if reason := clash(type(first), type(second), strategy):
                first, second = sorted((first, second), key=lambda each: not isinstance(each, _FIRST[reason]))
                raise ValueError(f"policies: {first!r} and {second!r} don't go together: {reason}. {received}")
    for policy in policies if transforms else ():
        if reason := transforms_refusal(type(policy), strategy):
            raise ValueError(
                f"policies: {policy!r} and transforms don't go together under {strategy}: {reason}. "
                f"Received: transforms={list(transforms)!r}"
            )
    is_averaged = any(isinstance(policy, ParameterAveraging) for policy in policies)
    for policy in policies:
        if isinstance(policy, Compression) and devices_per_replica > 1:
            raise ValueError(
                f"policies: {policy!r} does not go with devices_per_replica={devices_per_replica!r}: it encodes the "
                f"gradients of one device per worker; leave it away, or use devices_per_replica=1. {received}"
            )
        if isinstance(policy, Compression) and is_averaged and getattr(policy.codec, "momentum", 0):
            raise ValueError(
                f"policies: {policy!r} has momentum, by which a difference of parameters would count several times; "
                f"beside ParameterAveraging give the codec momentum=0. {received}"
            )
    return policies


def refusal(policy: type[Policy], strategy: str) -> str | None:
    """Returns the reason why a strategy refuses a policy, with the alternative; None if it accepts the policy."""
    if issubclass(policy, _STALENESS) and strategy != PARAMETER_SERVER:
        return _WITHOUT_STALENESS
    if issubclass(policy, ParameterAveraging) and strategy == PARAMETER_SERVER:
        return _WITHOUT_AVERAGING
    if issubclass(policy, Compression) and strategy not in (MULTI_WORKER, PARAMETER_SERVER):
        return _WITHOUT_MESSAGES
    if issubclass(policy, LazyRows) and strategy != PARAMETER_SERVER:
        return _WITHOUT_TABLES
    return None


def transforms_refusal(policy: type[Policy], strategy: str) -> str | None:
    """Returns the reason why a strategy refuses gradient transforms beside a policy; None if it accepts them."""
    if strategy == PARAMETER_SERVER:
        return None
    return next((reason for kind, reason in _WITHOUT_TRANSFORMS.items() if issubclass(policy, kind)), None)


def clash(first: type[Policy], second: type[Policy], strategy: str) -> str | None:
    """Returns the reason why a strategy refuses two policies together, with the remedy; None if it accepts them."""
    kinds = {_kind_of(first), _kind_of(second)}
    if len(kinds) == 1:
        return _ONE_OF_A_KIND
    if Aggregation in kinds and kinds & set(_STALENESS):
        return _IN_STEP
    if ParameterAveraging in kinds and Aggregation in kinds:
        return _ALONE
    return None


def _kind_of(policy: type[Policy]) -> type[Policy]:
    return next(kind for kind in _KINDS if issubclass(policy, kind))


def compose(policies: Sequence[Policy], strategy: str, total_num_replicas: int) -> Composition:
    """Assigns checked policies to a strategy, and combines the asynchronous ones into one `Aggregation`.

    Args:
      policies: the user's argument, which `check` has accepted.
      strategy: the strategy's name.
      total_num_replicas: how many replicas compute gradients.

    Raises:
      ValueError: a policy makes no sense with so many replicas.
    """
    for policy in policies:
        policy.begin(total_num_replicas, strategy)
    by_kind: dict[type[Policy], Any] = {_kind_of(type(policy)): policy for policy in policies}
    warmup = by_kind.get(Warmup)
    aggregation = by_kind.get(Aggregation)
    is_lazy = LazyRows in by_kind
    if aggregation is None and strategy == PARAMETER_SERVER and len(policies) > is_lazy:
        aggregation = Asynchronous(*(by_kind.get(kind) for kind in _STALENESS))
        aggregation.begin(total_num_replicas, strategy)
    return Composition(aggregation, warmup, by_kind.get(ParameterAveraging), by_kind.get(Compression), is_lazy)
