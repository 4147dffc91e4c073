# SPDX-License-Identifier: Apache-2.0
"""Batches: splitting among replicas, handles that stand for batches, and resuming in the middle of a pass."""
