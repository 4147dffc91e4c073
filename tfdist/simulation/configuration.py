# SPDX-License-Identifier: Apache-2.0
"""Models of the simulator from plain data, as in a YAML or JSON file, with errors that name the key."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Mapping
from typing import Any

from tfdist.simulation import delay_distributions
from tfdist.simulation.delay_distributions import DelayDistribution
from tfdist.simulation.models import ClusterModel, CodecModel, Failure, ModelProfile, NetworkModel, SparseTable

_MAX_TEXT = 10_000


def cluster_from_dict(data: Any) -> ClusterModel:
    """Builds a `ClusterModel` from its fields, with "network" and "failures" as mappings of theirs.

    Raises:
      ValueError: a key is unknown, or a value is invalid.
    """
    given = _checked(data, ClusterModel, "cluster")
    if given.get("compute") is not None:
        given["compute"] = distribution(given["compute"], "cluster.compute")
    if "network" in given:
        given["network"] = NetworkModel(**_checked(given["network"], NetworkModel, "cluster.network"))
    if "delays" in given:
        delays = _mapping(given["delays"], "cluster.delays")
        given["delays"] = {worker: distribution(each, f"cluster.delays.{worker}") for worker, each in delays.items()}
    if "speeds" in given:
        given["speeds"] = dict(_mapping(given["speeds"], "cluster.speeds"))
    if "failures" in given:
        failures = _list(given["failures"], "cluster.failures")
        given["failures"] = tuple(Failure(**_checked(each, Failure, "cluster.failures")) for each in failures)
    if given.get("server_shares") is not None:
        given["server_shares"] = tuple(_list(given["server_shares"], "cluster.server_shares"))
    return ClusterModel(**given)


def model_from_dict(data: Any) -> ModelProfile:
    """Builds a `ModelProfile` from its fields, with "sparse_tables" as a list of mappings.

    Raises:
      ValueError: a key is unknown, or a value is invalid.
    """
    given = _checked(data, ModelProfile, "model")
    if "sparse_tables" in given:
        tables = _list(given["sparse_tables"], "model.sparse_tables")
        given["sparse_tables"] = tuple(
            SparseTable(**_checked(each, SparseTable, "model.sparse_tables")) for each in tables
        )
    return ModelProfile(**given)


def codec_from_dict(data: Any) -> CodecModel | None:
    """Builds a `CodecModel` from its fields; None from None.

    Raises:
      ValueError: a key is unknown, or a value is invalid.
    """
    return None if data is None else CodecModel(**_checked(data, CodecModel, "codec"))


def distribution(data: Any, name: str) -> DelayDistribution:
    """Builds a distribution from text such as "lognormal(mean=0.2, s=1.0)", a mapping, or a list of durations.

    Args:
      data: {"distribution": "lognormal", "mean": 0.2, "s": 1.0}, equivalent text, or measured durations.
      name: name of the value in messages.

    Raises:
      ValueError: it is no distribution.
    """
    try:
        if isinstance(data, list | tuple):
            return delay_distributions.empirical(data)
        return DelayDistribution.from_dict(_call(data) if isinstance(data, str) else data)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: {error}") from None


def _call(text: str) -> dict[str, Any]:
    """Parses "lognormal(mean=0.2, s=1)" into the mapping; no code is evaluated."""
    try:
        if len(text) > _MAX_TEXT:
            raise ValueError("too long")
        call = ast.parse(text.strip(), mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
            raise ValueError("no call")
        return {"distribution": call.func.id} | {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        raise ValueError(
            f"write a distribution with its parameters, like lognormal(mean=0.2, s=1.0). Received: {text[:100]!r}"
        ) from None


def _checked(data: Any, kind: type, name: str) -> dict[str, Any]:
    """Returns the mapping as keyword arguments of a dataclass."""
    given, fields = dict(_mapping(data, name)), [field.name for field in dataclasses.fields(kind)]
    for key in given:
        if key not in fields:
            raise ValueError(f"{name} has no key {key!r}; use {', '.join(fields)}")
    required = [field.name for field in dataclasses.fields(kind) if _is_required(field)]
    if missing := [key for key in required if key not in given]:
        raise ValueError(f"{name} needs {', '.join(missing)}; add what is missing. Received: {given!r}")
    return given


def _is_required(field: dataclasses.Field) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _mapping(data: Any, name: str) -> Mapping[Any, Any]:
    if not isinstance(data, Mapping):
        raise ValueError(f"{name} must be a mapping of keys to values. Received: {data!r}")
    return data


def _list(data: Any, name: str) -> list[Any]:
    if not isinstance(data, list | tuple):
        raise ValueError(f"{name} must be a list. Received: {data!r}")
    return list(data)
