#!/usr/bin/env python3
"""Train, under torchrun or bare.

    torchrun launch/async.py --policy-lag 1                       one host, Monarch starts and watches the actors
    torchrun --nproc-per-node 4 launch/async.py --policy-lag 1    torchrun's ranks play the roles
    python launch/async.py --policy-lag 1                         as the first

The same as `asyncspec train`; see --help.
"""

import os
import sys

# This directory's ray.py and monarch.py must not be taken for the packages.
sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry) != os.path.dirname(os.path.realpath(__file__))]

from asyncspec.cli import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
