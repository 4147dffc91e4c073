# SPDX-License-Identifier: Apache-2.0
"""Sums of tensors over the workers: by TensorFlow's collectives, or by MPI."""
