# SPDX-License-Identifier: Apache-2.0
"""Passes over the data: splitting among replicas, handles that stand for batches, reading on workers, resuming."""
