# SPDX-License-Identifier: Apache-2.0
"""Server processes of the tasks `worker` and `ps`, and the embedded cluster of local processes."""
