# SPDX-License-Identifier: Apache-2.0
"""Views of update logs: `tfdist watch` in a terminal, and the page in TensorBoard."""
