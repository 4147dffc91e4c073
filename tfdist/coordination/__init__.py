# SPDX-License-Identifier: Apache-2.0
"""Coordination of processes and threads: runners of policies, quorum, rendezvous, stalls. No TensorFlow import."""
