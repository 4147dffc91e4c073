# SPDX-License-Identifier: Apache-2.0
"""The engines of `ParameterServerStrategy`: steps are sent to the workers, gradients to the parameter servers."""
