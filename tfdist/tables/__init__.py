# SPDX-License-Identifier: Apache-2.0
"""Variables on parameter servers: atomic updates, shards, and tables of embeddings."""
