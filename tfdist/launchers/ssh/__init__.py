# SPDX-License-Identifier: Apache-2.0
"""Launcher for machines reached by ssh."""
