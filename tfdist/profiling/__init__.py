# SPDX-License-Identifier: Apache-2.0
"""Command `tfdist profile`: runs a training script on one device, and writes what `tfdist advise` needs."""
