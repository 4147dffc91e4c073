# SPDX-License-Identifier: Apache-2.0
"""The engine of `MirroredStrategy` with a policy: each device of one process computes in a thread of its own."""
