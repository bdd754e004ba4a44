#!/usr/bin/env python3
"""Trains a policy under Ray: on the cluster of RAY_ADDRESS or of `ray start`, else on one that it starts on this host.

    python launch/ray.py --policy-lag 1

This is the same as `asyncspec train --launcher ray`; see --help and docs/how-to/ray.md.
"""

from asyncspec.cli import run_script

run_script(__name__, __file__, "--launcher", "ray")
