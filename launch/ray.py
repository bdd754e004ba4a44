#!/usr/bin/env python3
"""Train under Ray: on the cluster of RAY_ADDRESS or of `ray start`, else on one that is started on this host.

    python launch/ray.py --policy-lag 1

The same as `asyncspec train --launcher ray`; see --help and docs/launching.md.
"""

from asyncspec.cli import run_script

run_script(__name__, __file__, "--launcher", "ray")
