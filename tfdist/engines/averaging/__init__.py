# SPDX-License-Identifier: Apache-2.0
"""The engine of `ParameterAveraging`: each replica trains alone, and all average every H steps."""
