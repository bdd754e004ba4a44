#!/usr/bin/env python3
"""Train under Monarch: on this host, and with --hosts on others on which `asyncspec host` runs.

    python launch/monarch.py --policy-lag 1
    python launch/monarch.py --hosts HOST1,HOST2 deployment.nodes=trainer+logprob,2*generator

The same as `asyncspec train --launcher monarch`; see --help and docs/launching.md.
"""

import os
import sys

# This directory's ray.py and monarch.py must not be taken for the packages.
sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry) != os.path.dirname(os.path.realpath(__file__))]

from asyncspec.cli import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(["train", "--launcher", "monarch", *sys.argv[1:]]))
