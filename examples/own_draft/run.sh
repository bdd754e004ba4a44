#!/usr/bin/env bash
# Train an EAGLE-3 draft for a policy, then use it. The policy here is the shipped one; put the directory of yours.
set -euo pipefail
cd "$(dirname "$0")"
policy=${POLICY:-asset:tiny/policy} draft=${DRAFT:-draft}
asyncspec draft train --policy "$policy" --out "$draft" --minutes "${MINUTES:-0.5}"
asyncspec train --steps 10 --run-dir "${RUN:-runs/example-own-draft}" deployment.device=cpu \
    model.path="$policy" speculation.draft_path="$draft" "$@"
