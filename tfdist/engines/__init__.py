# SPDX-License-Identifier: Apache-2.0
"""Engines: collect the replicas' contributions, and apply the updates."""
