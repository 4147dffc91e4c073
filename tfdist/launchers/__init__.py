# SPDX-License-Identifier: Apache-2.0
"""Launchers: each starts the same script as many tasks, with a pure `plan` and a `submit`. No TensorFlow import."""
