# SPDX-License-Identifier: Apache-2.0
"""Launcher for pods on Kubernetes."""
