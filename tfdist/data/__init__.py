# SPDX-License-Identifier: Apache-2.0
"""How a batch is split among replicas, and where a pass over the data can be taken up again."""
