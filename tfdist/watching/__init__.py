# SPDX-License-Identifier: Apache-2.0
"""Commands that show update logs: `tfdist watch` in a terminal, `tfdist trace` as a file for Perfetto."""
