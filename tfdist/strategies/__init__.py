# SPDX-License-Identifier: Apache-2.0
"""Strategies: the three classes that users construct."""

from tfdist.compat import versions

# Before the strategies' modules import what a new version of TensorFlow or Keras may have taken away.
versions.check()
