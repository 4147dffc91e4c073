# SPDX-License-Identifier: Apache-2.0
"""Private names of TensorFlow and Keras, one module per reason."""
