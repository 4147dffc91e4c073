# SPDX-License-Identifier: Apache-2.0
"""A Keras step while it is traced: split into contribute and update, weighed by examples, its variables on replicas."""
