# SPDX-License-Identifier: Apache-2.0
"""Everything that tfdist needs from below Keras' public surface: a module for each thing that is touched."""
