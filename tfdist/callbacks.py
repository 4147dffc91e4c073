# SPDX-License-Identifier: Apache-2.0
"""Keras callbacks for training under a tfdist strategy."""

from tfdist.learning_rate import ScaleLearningRate
from tfdist.resume.callback import Resume
from tfdist.telemetry.callback import Telemetry

__all__ = ["Resume", "ScaleLearningRate", "Telemetry"]
