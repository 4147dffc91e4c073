# SPDX-License-Identifier: Apache-2.0
"""The engine of `MultiWorkerMirroredStrategy` with a policy: quorum all-reduce among processes."""
