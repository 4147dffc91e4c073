# SPDX-License-Identifier: Apache-2.0
"""The engine of `Warmup` under the mirrored strategies: the first replica trains alone, then gives all its state."""
