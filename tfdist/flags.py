# SPDX-License-Identifier: Apache-2.0
"""Strategy, policies, cluster and telemetry from absl flags and flagfiles, so that one script serves every setting.

    from absl import app
    import tfdist

    tfdist.flags.define_flags()

    def main(_):
        strategy = tfdist.strategy_from_flags()
        ...
        model.fit(dataset, callbacks=tfdist.flags.callbacks_from_flags())

    app.run(main)

Importing this module defines no flags; `define_flags` does. All flags start with `tfdist_`.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import functools
import inspect
import json
import os
import re
import shlex
from collections.abc import Callable, Mapping
from typing import Any

from absl import flags

import tfdist
from tfdist.cluster import Cluster, ClusterError
from tfdist.policies.base import Policy

_STRATEGIES = ("auto", "mirrored", "multi_worker", "parameter_server", "tpu")
_MAX_TEXT = 10_000
# Values of arguments in examples; 2 of others.
_VALUES = {"spares": 1, "mean": 0.2, "secs": 0.1, "samples": [0.1, 0.2], "codec": '"auto"'}


def define_flags(flag_values: flags.FlagValues = flags.FLAGS) -> None:
    """Defines the flags; does nothing the second time.

    Args:
      flag_values: the set of flags to extend; absl's global flags by default.
    """
    if "tfdist_strategy" in flag_values:
        return
    text = functools.partial(flags.DEFINE_string, flag_values=flag_values)
    number = functools.partial(flags.DEFINE_integer, flag_values=flag_values)
    chosen = "which strategy; auto: parameter_server or multi_worker as TF_CONFIG says, else mirrored"
    flags.DEFINE_enum("tfdist_strategy", "auto", _STRATEGIES, chosen, flag_values=flag_values)
    policy_help = "a policy, such as 'Warmup(epochs=1)'; once for each"
    flags.DEFINE_multi_string("tfdist_policies", [], policy_help, flag_values=flag_values)
    text("tfdist_cluster", None, 'addresses, such as \'{"worker": ["a:2222", "b:2222"]}\'; else TF_CONFIG')
    text("tfdist_task", None, "which task this is, such as worker:1; with --tfdist_cluster")
    number("tfdist_num_workers", None, "workers of the cluster on this machine, without another (2)", lower_bound=1)
    number("tfdist_num_ps", None, "parameter servers of it (1)", lower_bound=1)
    text("tfdist_data_sharding", "shard", "parameter_server: shard or replicate")
    text("tfdist_transfer", "auto", "parameter_server: auto or plain")
    flags.DEFINE_list("tfdist_devices", None, "mirrored: devices, such as GPU:0,GPU:1", flag_values=flag_values)
    spanning = "devices of a replica, each with a part of the layers; not of tpu"
    number("tfdist_devices_per_replica", 1, spanning, lower_bound=1)
    text("tfdist_tpu", None, "tpu: name; by default the variable TPU_NAME, else local")
    flags.DEFINE_float("tfdist_start_timeout_secs", 300.0, "seconds to wait for other tasks", flag_values=flag_values)
    text("tfdist_telemetry_dir", None, "write telemetry for TensorBoard into this directory")
    number("tfdist_telemetry_freq", 50, "batches between two of its points", lower_bound=1)


def strategy_from_flags(flag_values: flags.FlagValues = flags.FLAGS) -> Any:
    """Builds the strategy that the flags describe. In a server task (worker or ps), serves and then ends the process.

    With --tfdist_cluster and --tfdist_task it sets the environment variable TF_CONFIG, which TensorFlow reads, too.

    Args:
      flag_values: the set of flags that `define_flags` has extended.

    Returns:
      A tfdist strategy, or a tf.distribute.TPUStrategy.

    Raises:
      ValueError: a value is invalid, or a policy is not compatible with the strategy or another policy.
      ClusterError: the cluster is invalid.
    """
    _check_ready(flag_values)
    policies = policies_from_flags(flag_values)
    cluster = _cluster_from_flags(flag_values)
    name = flag_values.tfdist_strategy
    if name == "auto":
        name = "mirrored" if cluster is None else "parameter_server" if cluster.num_ps else "multi_worker"
    return _BUILDERS[name](flag_values, policies)


def policies_from_flags(flag_values: flags.FlagValues = flags.FLAGS) -> list[Policy]:
    """Returns the policies alone, in the order of the flags.

    Raises:
      ValueError: a policy is unknown, or has invalid arguments.
    """
    _check_ready(flag_values)
    return [parse_policy(text) for text in flag_values.tfdist_policies]


def callbacks_from_flags(flag_values: flags.FlagValues = flags.FLAGS) -> list[Any]:
    """Returns the callbacks for `fit`: `tfdist.callbacks.Telemetry` with --tfdist_telemetry_dir, else []."""
    _check_ready(flag_values)
    if not flag_values.tfdist_telemetry_dir:
        return []
    from tfdist import callbacks

    return [callbacks.Telemetry(flag_values.tfdist_telemetry_dir, flag_values.tfdist_telemetry_freq)]


def _check_ready(flag_values: flags.FlagValues) -> None:
    if "tfdist_strategy" not in flag_values:
        raise ValueError("the flags are not defined; call tfdist.flags.define_flags() where the script defines its own")
    if not flag_values.is_parsed():
        raise ValueError("the flags are not parsed; use absl.app.run(main), or call absl.flags.FLAGS(sys.argv) before")


# Policies.


def parse_policy(text: str, flag: str = "--tfdist_policies") -> Policy:
    """Builds a policy from text such as "BackupWorkers(spares=1)". Arguments are literals; no code is evaluated.

    Args:
      text: the text.
      flag: name of the flag in messages.

    Raises:
      ValueError: the text is invalid, or the policy refuses the arguments.
    """
    known = {name: getattr(tfdist, name) for name, home in tfdist.MODULE_OF.items() if ".policies." in home}
    return build(text, flag, "policy", known, "Warmup(epochs=1)")


def build(text: str, flag: str, kind: str, known: Mapping[str, Callable[..., Any]], example: str) -> Any:
    """Builds an object from text such as "Name(1, key=2)", or "Name"; see `parse_policy`.

    Args:
      text: the text.
      flag: name of the flag in messages.
      kind: kind of the object in messages.
      known: what builds it, by name.
      example: a text that is valid.
    """
    try:
        name, arguments, keywords = _parse_call(text)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        shown = text if len(text) <= _MAX_TEXT else f"{text[:100]}..."
        named = [each for each in re.findall(r"(\w+)(\([^()]*)?", shown) if each[0] in known]
        calls = [_example(call, given, known, example) for call, given in named] or [example]
        form = " ".join(f"{flag}={shlex.quote(each)}" for each in calls)
        raise ValueError(f"{flag} is no {kind} with plain arguments; write it as {form}. Received: {shown!r}") from None
    if name not in known:
        close = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {close[0]}?" if close else f"use one of {', '.join(sorted(known))}."
        raise ValueError(f"{flag} names no {kind}; {hint} Received: {text!r}")
    signature = inspect.signature(known[name])
    try:
        signature.bind(*arguments, **keywords)
    except TypeError:
        taken = ", ".join(str(each.replace(annotation=each.empty)) for each in signature.parameters.values())
        form = f"write {flag}={shlex.quote(_example(name, '', known, example))}"
        raise ValueError(f"{flag} must be {name}({taken}); {form}. Received: {text!r}") from None
    try:
        return known[name](*arguments, **keywords)
    except (TypeError, ValueError) as error:
        raise ValueError(" ".join(f"{flag}={text}: {error}".split())) from None


def _example(name: str, arguments: str, known: Mapping[str, Callable[..., Any]], example: str) -> str:
    """Returns a valid text for a name: with these arguments, such as "(spares=1", or else with all that it needs."""
    with contextlib.suppress(SyntaxError, ValueError):
        if arguments and _parse_call(call := f"{name}{arguments})"):
            return call
    parameters = inspect.signature(known[name]).parameters.values()
    needed = ", ".join(f"{each.name}={_VALUES.get(each.name, 2)}" for each in parameters if each.default is each.empty)
    return example if example.startswith(f"{name}(") else f"{name}({needed})"


def _parse_call(text: str) -> tuple[str, list[Any], dict[str, Any]]:
    """Parses the text of `build` into the name, the arguments and the keyword arguments; raises several errors."""
    if len(text) > _MAX_TEXT:
        raise ValueError("too long")
    node = ast.parse(text.strip(), mode="eval").body
    call = node if isinstance(node, ast.Call) else ast.Call(func=node, args=[], keywords=[])
    name = ast.unparse(call.func).removeprefix("tfdist.").removeprefix("policies.")
    if not name.isidentifier() or any(each.arg is None for each in call.keywords):
        raise ValueError("no name, or **")
    keywords = {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}
    return name, [ast.literal_eval(each) for each in call.args], keywords


# Clusters.


def _cluster_from_flags(flag_values: flags.FlagValues) -> Cluster | None:
    """Returns the cluster in the flags, and sets TF_CONFIG to it; without these flags the cluster in TF_CONFIG."""
    given, task = flag_values.tfdist_cluster, flag_values.tfdist_task
    if given is None and task is None:
        return Cluster.from_environment()
    if given is None or task is None:
        missing = "--tfdist_task=worker:0" if task is None else "--tfdist_cluster"
        raise ValueError(f"--tfdist_cluster and --tfdist_task belong together; add {missing}. Received: one of them")
    if "TF_CONFIG" in os.environ:
        raise ValueError("--tfdist_cluster and the variable TF_CONFIG both describe the cluster; remove one of them")
    cluster = parse_cluster(given, task)
    os.environ["TF_CONFIG"] = cluster.to_tf_config()
    return cluster


def parse_cluster(text: str, task: str) -> Cluster:
    """Parses the values of --tfdist_cluster and --tfdist_task.

    Raises:
      ClusterError: a value is invalid.
    """
    job, colon, index = task.rpartition(":")
    if not (colon and index.isascii() and index.isdigit() and len(index) < 10):
        raise ClusterError(f"--tfdist_task is no task; write worker:1. Received: {task!r}")
    try:
        # Parsed as a TF_CONFIG, which also detects duplicate keys and other errors that JSON accepts.
        task = json.dumps({"type": job, "index": int(index)})
        return Cluster.from_tf_config(f'{{"cluster": {text}, "task": {task}}}')
    except ClusterError as error:
        problem = str(error).removeprefix("TF_CONFIG: ")
        raise ClusterError(f"--tfdist_cluster, --tfdist_task: {problem}") from None


# Strategies.


def _build_own(strategy: str, arguments: str, values: flags.FlagValues, policies: list[Any]) -> Any:
    """Builds a strategy of tfdist from its name, and from those of the arguments that have a flag."""
    given = {name: values[f"tfdist_{name}"].value for name in arguments.split()}
    return getattr(tfdist, strategy)(policies=policies, **given)


def _tpu(values: flags.FlagValues, policies: list[Any]) -> Any:
    if policies:
        raise ValueError(
            f"--tfdist_strategy=tpu goes with no policy: all chips of a slice compute in lockstep; remove "
            f"--tfdist_policies. Received: {', '.join(map(repr, policies))}"
        )
    if values.tfdist_devices_per_replica > 1:
        raise ValueError(
            "--tfdist_strategy=tpu has replicas of one device each; remove --tfdist_devices_per_replica. "
            f"Received: --tfdist_devices_per_replica={values.tfdist_devices_per_replica}"
        )
    import tensorflow as tf

    name = values.tfdist_tpu or os.environ.get("TPU_NAME") or "local"
    try:
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu=name)
        tf.config.experimental_connect_to_cluster(resolver)
        tf.tpu.experimental.initialize_tpu_system(resolver)
    except (ImportError, OSError, RuntimeError, ValueError, tf.errors.OpError) as error:
        problem = (" ".join(str(error).split()) or type(error).__name__)[:300]
        raise ValueError(
            f"--tfdist_strategy=tpu found no TPU; run it where there is one, with the package tensorflow-tpu (2.20 at "
            f"most). Received: --tfdist_tpu={name} ({problem})"
        ) from error
    return tf.distribute.TPUStrategy(resolver)


_BUILDERS: dict[str, Callable[[flags.FlagValues, list[Any]], Any]] = {
    "mirrored": functools.partial(_build_own, "MirroredStrategy", "devices devices_per_replica"),
    "multi_worker": functools.partial(
        _build_own, "MultiWorkerMirroredStrategy", "start_timeout_secs devices_per_replica"
    ),
    "parameter_server": functools.partial(
        _build_own,
        "ParameterServerStrategy",
        "data_sharding num_workers num_ps start_timeout_secs transfer devices_per_replica",
    ),
    "tpu": _tpu,
}
