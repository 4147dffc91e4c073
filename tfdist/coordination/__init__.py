# SPDX-License-Identifier: Apache-2.0
"""Waiting, watching and meeting: what runs around training, in threads and over sockets. No TensorFlow import."""
