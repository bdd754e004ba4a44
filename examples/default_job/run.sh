#!/usr/bin/env bash
# The default job: a policy of 1.2 M parameters learns to work out its sums. Then an audit and a report.
set -euo pipefail
run=${RUN:-runs/example-default-job}
asyncspec train --policy-lag 1 --run-dir "$run" "$@"
asyncspec audit "$run"
asyncspec report "$run"
