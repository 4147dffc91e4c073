# SPDX-License-Identifier: Apache-2.0
"""Private names of TensorFlow and Keras that tfdist needs: one module for each reason."""
