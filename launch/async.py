#!/usr/bin/env python3
"""Train, under torchrun or bare.

    torchrun launch/async.py --policy-lag 1                       one host, Monarch starts and watches the actors
    torchrun --nproc-per-node 4 launch/async.py --policy-lag 1    torchrun's ranks play the roles
    python launch/async.py --policy-lag 1                         as the first

The same as `asyncspec train`; see --help.
"""

import sys

from asyncspec.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
