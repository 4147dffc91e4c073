# SPDX-License-Identifier: Apache-2.0
"""What is measured while training: reports, and callbacks that write them down."""
