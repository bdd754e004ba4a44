#!/usr/bin/env bash
# Take pictures of a run's report, of its rollouts and of its TensorBoard page with a headless Chromium.
#
#     scripts/screenshots.sh RUN OUT_DIRECTORY [STEP]
#
# STEP is the one whose rollouts are shown; the last one that has some, if it is left out.
set -euo pipefail
run=${1:?usage: screenshots.sh RUN OUT_DIRECTORY}
out=${2:?usage: screenshots.sh RUN OUT_DIRECTORY}
browser=$(command -v chromium || command -v chromium-browser || command -v google-chrome) || { echo "no Chromium on the PATH" >&2; exit 1; }
mkdir -p "$out"
out=$(cd "$out" && pwd)

shot() { # URL FILE SIZE; there is no GPU for WebGL; without WebGL TensorBoard draws its curves as SVG
    timeout 120 "$browser" --headless=new --no-sandbox --disable-gpu --disable-webgl --disable-3d-apis --hide-scrollbars \
        --window-size="$3" --virtual-time-budget=60000 --screenshot="$out/$2" "$1" 2>/dev/null
}

page=$(mktemp --suffix=.html)
asyncspec report "$run" --out "$page"
shot "file://$page" report.png 1300,2500
rollouts=${page%.html}-rollouts.html
step=${3:-$(python3 -c "import json, sys; print(max(row['step'] for row in map(json.loads, open(sys.argv[1])) if not row['evaluation']))" "$run/rollouts.jsonl")}
shot "file://$rollouts#kind=training&step=$step" rollouts.png 1300,1250
port=$((20000 + RANDOM % 20000))
tensorboard --logdir "$run/tb" --port "$port" --host 127.0.0.1 >/dev/null 2>&1 &
board=$!
trap 'kill "$board"; rm -f "$page" "$rollouts"' EXIT
for _ in $(seq 60); do # until TensorBoard has loaded the run
    python3 -c "import sys, urllib.request as u; sys.exit(b'time/step' not in u.urlopen('http://127.0.0.1:$port/data/plugin/scalars/tags').read())" \
        2>/dev/null && break
    sleep 0.5
done
shot "http://127.0.0.1:$port/?tagFilter=time%2F#timeseries" tensorboard.png 1300,1500
