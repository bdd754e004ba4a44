#!/usr/bin/env python3
"""Trains a policy, with torchrun or without.

    torchrun launch/async.py --policy-lag 1                       one host: Monarch starts and watches the actors
    torchrun --nproc-per-node 4 launch/async.py --policy-lag 1    torchrun's ranks play the roles
    python launch/async.py --policy-lag 1                         the same as the first

This is the same as `asyncspec train`; see --help.
"""

from asyncspec.cli import run_script

run_script(__name__, __file__)
