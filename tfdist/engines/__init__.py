# SPDX-License-Identifier: Apache-2.0
"""How contributions travel: from the replicas to the update."""
