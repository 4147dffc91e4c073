# SPDX-License-Identifier: Apache-2.0
"""The one wall to TensorFlow and Keras: what tfdist needs from below their public surface, a module for each thing.

Here, and nowhere else, are private names, methods that are replaced, frames of callers and edits of traced graphs. Each
section of a module says why there is no public way, and restores what it changes or says that the change is permanent.
Each module lists in `NEEDS` the names that it uses; `versions.check` says in one line which of them the installed
versions lack.
"""
