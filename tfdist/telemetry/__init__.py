# SPDX-License-Identifier: Apache-2.0
"""Measurements of training: reports, and the callback that writes them to TensorBoard."""
