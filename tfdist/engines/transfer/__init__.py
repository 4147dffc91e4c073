# SPDX-License-Identifier: Apache-2.0
"""Variables and gradients on their way between workers and parameter servers; `plan` decides their form."""
