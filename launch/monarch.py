#!/usr/bin/env python3
"""Trains a policy under Monarch: on this host and, with --hosts, on others that run `asyncspec host`.

    python launch/monarch.py --policy-lag 1
    python launch/monarch.py --hosts HOST1,HOST2 deployment.nodes=trainer+logprob,2*generator

This is the same as `asyncspec train --launcher monarch`; see --help and docs/how-to/monarch-hosts.md.
"""

from asyncspec.cli import run_script

run_script(__name__, __file__, "--launcher", "monarch")
