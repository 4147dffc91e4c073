# SPDX-License-Identifier: Apache-2.0
"""TensorBoard plugin `tfdist`: a page that shows all workers of a training, from its update log. No TensorFlow."""
