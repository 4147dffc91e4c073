# SPDX-License-Identifier: Apache-2.0
"""Supervision of a job's processes: start, watch, restart, and decide the exit code."""
