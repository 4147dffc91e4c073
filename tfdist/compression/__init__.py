# SPDX-License-Identifier: Apache-2.0
"""Codecs of gradients: half precision, thresholds, largest values, signs and low rank, with error feedback.

A codec is pure: `init` returns its state, `encode` and `decode` (or `exchange`, which calls both) take and return it.
"""

from tfdist.compression.codec import Codec, LocalTransport, Transport
from tfdist.compression.half_precision import HalfPrecision
from tfdist.compression.power_sgd import PowerSGD
from tfdist.compression.sign_sgd import SignSGD
from tfdist.compression.threshold import Threshold
from tfdist.compression.top_k import TopK

__all__ = ["Codec", "HalfPrecision", "LocalTransport", "PowerSGD", "SignSGD", "Threshold", "TopK", "Transport"]
