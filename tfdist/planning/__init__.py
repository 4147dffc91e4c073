# SPDX-License-Identifier: Apache-2.0
"""Advice before training is distributed: profiles, networks, predictions and one recommendation. No TensorFlow."""
