#!/bin/sh
# What a GPU shows, into a directory: the tests that need one; the default job on it, in float32 and bfloat16; a job of Qwen3-0.6B's sizes with
# random weights; and both policies' generation by live sequences and draft length, beside what reading their weights takes.
#
#   scripts/measure_gpu.sh DIRECTORY
#
# DEVICE=cpu LIKE=50mb go through the same motions without a GPU.
set -eu
out=$(mkdir -p "${1:?expected a directory}" && cd "$1" && pwd)
cd "$(dirname "$0")/.."
device=${DEVICE:-cuda} like=${LIKE:-qwen3-0.6b}
python -m pytest -q tests/test_gpu.py tests/test_timing.py > "$out/tests.txt" 2>&1
tail -1 "$out/tests.txt"
for dtype in float32 bfloat16; do
    asyncspec train "deployment.device=$device" "model.dtype=$dtype" --steps "${STEPS:-60}" --run-dir "$out/default-$dtype"
    asyncspec audit "$out/default-$dtype"
done
python scripts/make_random.py "$out/random" --like "$like"
random="model.path=$out/random speculation.draft_path=$out/random/eagle3 model.dtype=bfloat16 deployment.device=$device"
# shellcheck disable=SC2086  # fields are words
asyncspec train --config qwen3_0.6b_1gpu $random data.reward=scripts.make_random:parity data.eval_prompts=8 eval.every=0 --steps 4 --run-dir "$out/random-run"
asyncspec audit "$out/random-run"
asyncspec bench engine "deployment.device=$device" --repeats "${REPEATS:-2}" --out "$out/engine"
# shellcheck disable=SC2086
asyncspec bench engine $random --repeats "${REPEATS:-2}" --out "$out/engine-random"
rm -r "$out/random"
