# SPDX-License-Identifier: Apache-2.0
"""What users construct: the three strategies."""
