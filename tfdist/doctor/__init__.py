# SPDX-License-Identifier: Apache-2.0
"""`tfdist doctor`: checks of a machine and of a cluster before training."""
