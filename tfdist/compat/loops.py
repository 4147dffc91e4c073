# SPDX-License-Identifier: Apache-2.0
"""Tells whether a traced operation is part of a loop, or of a conditional.

There is no public way: TensorFlow's public graphs don't say which construct they are the body of.
"""

from __future__ import annotations

from tensorflow.python.ops import control_flow_v2_func_graphs

from tfdist.compat import enclosing_graphs

NEEDS = (
    "tensorflow.python.ops.control_flow_v2_func_graphs:CondBranchFuncGraph",
    "tensorflow.python.ops.control_flow_v2_func_graphs:WhileBodyFuncGraph",
    "tensorflow.python.ops.control_flow_v2_func_graphs:WhileCondFuncGraph",
)

_KINDS = (control_flow_v2_func_graphs.WhileBodyFuncGraph, control_flow_v2_func_graphs.WhileCondFuncGraph)


def in_loop() -> bool:
    """Returns True while the body or the condition of a `tf.while_loop` is traced."""
    return any(isinstance(graph, _KINDS) for graph in enclosing_graphs.enclosing())


def in_branch_or_loop() -> bool:
    """Returns True while a part of a `tf.while_loop` or a branch of a `tf.cond` is traced."""
    kinds = (*_KINDS, control_flow_v2_func_graphs.CondBranchFuncGraph)
    return any(isinstance(graph, kinds) for graph in enclosing_graphs.enclosing())
