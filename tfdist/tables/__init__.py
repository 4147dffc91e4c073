# SPDX-License-Identifier: Apache-2.0
"""Variables in shards: tables of embeddings, their rows and updates."""
