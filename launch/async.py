#!/usr/bin/env python3
"""Train, under torchrun or bare.

    torchrun launch/async.py --policy-lag 1                       one host, Monarch starts and watches the actors
    torchrun --nproc-per-node 4 launch/async.py --policy-lag 1    torchrun's ranks play the roles
    python launch/async.py --policy-lag 1                         as the first

The same as `asyncspec train`; see --help.
"""

from asyncspec.cli import run_script

run_script(__name__, __file__)
