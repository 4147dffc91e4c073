# SPDX-License-Identifier: Apache-2.0
"""`tfdist launch ray` from a checkout, without installing: python launch/ray.py [FLAGS] SCRIPT [ARGUMENTS]."""

import os
import pathlib
import sys

# In place of this folder, whose modules are named after platforms and must not hide packages of the same name.
sys.path[0] = str(pathlib.Path(__file__).resolve().parent.parent)
# The wrapper around each task finds tfdist here, too: it does not look in the working directory.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), sys.path[0]]))

from tfdist import cli  # noqa: E402

if __name__ == "__main__":
    sys.exit(cli.main(["launch", "ray", *sys.argv[1:]]))
