# SPDX-License-Identifier: Apache-2.0
"""The engine of `MultiWorkerMirroredStrategy` without a policy: one round of communication in each step of `fit`."""
