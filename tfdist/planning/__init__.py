# SPDX-License-Identifier: Apache-2.0
"""Predictions before you pay: profiles, simulated clusters that run the real policies, and one recommendation."""
