# SPDX-License-Identifier: Apache-2.0
"""Start the same script on many tasks: plan (pure) and submit. No TensorFlow import."""
