#!/bin/sh
# Run all measurements that need a GPU, or only the named parts, and write the results into a directory.
#
#   scripts/measure_gpu.sh DIRECTORY [tests] [default] [smollm2] [modes] [random] [stop] [trainer] [costs]
#       [engine] [engine-random] [vllm]
#
#   tests          the tests that need a GPU
#   default        the default job, in float32 and in bfloat16
#   smollm2        SmolLM2-135M-Instruct learns short sums; examples/smollm2/prepare.py names the packages that it needs
#   modes          the same model, synchronous and asynchronous, without speculation and with n-gram lookup: where the
#                  time of a step goes
#   random         a job with random weights of Qwen3-0.6B's sizes
#   stop           whether an interrupted job with such weights, in float32, ends with a whole checkpoint, and how fast
#   trainer        the trainer's passes with such weights: utilization of the GPU, and memory
#   costs          what steps of both policies cost by live rows and draft length, and the time to read their weights
#   engine         generation with the shipped policy
#   engine-random  generation with random weights of Qwen3-0.6B's sizes
#   vllm           vLLM's tests of one device, and its automatic draft length against fixed ones; only if named, and with
#                  the Python of an environment that has vLLM
#
# DEVICE=cpu LIKE=50mb do the same without a GPU, on smaller weights. STEPS and REPEATS set the lengths of the parts.
# LAUNCH is the command that trains, for example "torchrun --nproc-per-node 2 launch/async.py" where Monarch is missing.
set -eu
out=$(mkdir -p "${1:?expected a directory}" && cd "$1" && pwd)
shift
cd "$(dirname "$0")/.."
[ $# -gt 0 ] || set -- tests default smollm2 modes random stop trainer costs engine engine-random
device=${DEVICE:-cuda} failed=0
parts="tests default smollm2 modes random stop trainer costs engine engine-random vllm"
for part in "$@"; do
    case " $parts " in
    *" $part "*) ;;
    *)
        echo "$part: expected one of $parts" >&2
        exit 2 ;;
    esac
done
asyncspec() { python3 -m asyncspec.cli "$@"; }
launch=${LAUNCH:-python3 -m asyncspec.cli train}
own() { # make the policy of random weights, and set the fields that name it
    if [ ! -d "$out/policy" ]; then
        python3 scripts/make_random.py "$out/policy.partial" --like "${LIKE:-qwen3-0.6b}"
        mv "$out/policy.partial" "$out/policy"
    fi
    fields="model.path=$out/policy speculation.draft_path=$out/policy/eagle3 model.dtype=bfloat16"
}
for part in "$@"; do
    case $part in
    tests)
        python3 -m pytest -q tests/test_gpu.py tests/test_spans.py > "$out/tests.txt" 2>&1 || failed=1
        tail -1 "$out/tests.txt" ;;
    default)
        for dtype in float32 bfloat16; do
            $launch "deployment.device=$device" "model.dtype=$dtype" --steps "${STEPS:-60}" --run-dir "$out/default-$dtype" \
                || failed=1
            asyncspec audit "$out/default-$dtype" || failed=1
        done ;;
    smollm2)
        [ -d smollm2/model ] || python3 examples/smollm2/prepare.py
        $launch --config examples/smollm2/config.yaml "deployment.device=$device" --steps "${STEPS:-120}" \
            --run-dir "$out/smollm2" || failed=1
        asyncspec audit "$out/smollm2" || failed=1
        rm -rf "$out/smollm2/checkpoint"* ;;
    modes)
        [ -d smollm2/model ] || python3 examples/smollm2/prepare.py
        for lag in 0 1; do
            for method in none ngram; do
                run=$out/lag$lag-$method
                $launch --config examples/smollm2/config.yaml "deployment.device=$device" --policy-lag $lag \
                    "speculation.method=$method" --steps "${STEPS:-30}" --run-dir "$run" || failed=1
                asyncspec audit "$run" || failed=1
                asyncspec report --text "$run" > "$run.txt" || failed=1
                rm -rf "$run/checkpoint"*
            done
        done ;;
    random) # shellcheck disable=SC2086  # $fields must be split into words
        own
        $launch --config qwen3_0.6b_1gpu $fields "deployment.device=$device" data.reward=asyncspec.tasks.sums:parity data.eval_prompts=8 \
            eval.every=0 --steps 4 --run-dir "$out/random" || failed=1
        asyncspec audit "$out/random" || failed=1
        rm -rf "$out/random/checkpoint"* ;;
    trainer)
        own
        python3 scripts/measure_trainer.py "$out/policy" --device "$device" --scale "${SCALE:-1}" \
            > "$out/trainer.txt" 2>&1 || failed=1
        cat "$out/trainer.txt" ;;
    stop) # shellcheck disable=SC2086
        own
        $launch $fields model.dtype=float32 "deployment.device=$device" data.reward=asyncspec.tasks.sums:parity \
            data.eval_prompts=0 checkpoint.every=0 rl.groups_per_step=4 sampling.max_response_tokens=64 --steps 1000 \
            --run-dir "$out/stop" > "$out/stop.txt" 2>&1 &
        pid=$!
        until [ "$(cat "$out/stop/metrics.jsonl" 2>/dev/null | wc -l)" -ge 2 ]; do
            kill -0 $pid 2>/dev/null || break
            sleep 1
        done
        began=$(date +%s)
        if kill -TERM $pid; then
            wait $pid || true
            echo "stopped within $(($(date +%s) - began)) s" | tee -a "$out/stop.txt"
        else
            failed=1
        fi
        tail -4 "$out/stop.txt"
        asyncspec audit "$out/stop" || failed=1
        python3 -c "import sys; from pathlib import Path; from asyncspec.ledger import checkpoint; found = \
checkpoint.newest(Path(sys.argv[1]), 'trainer', print); print('whole checkpoint:', found); sys.exit(found is None)" \
            "$out/stop" || failed=1
        rm -rf "$out/stop/checkpoint"* ;;
    costs)
        {
            python3 scripts/step_costs.py "deployment.device=$device"
            python3 scripts/step_costs.py --like "${LIKE:-qwen3-0.6b}" "deployment.device=$device" model.dtype=bfloat16
        } > "$out/costs.txt" ;;
    engine)
        asyncspec bench engine "deployment.device=$device" --repeats "${REPEATS:-2}" --out "$out/engine" ;;
    engine-random) # with random weights every rollout runs to the limit, shellcheck disable=SC2086
        own
        asyncspec bench engine $fields "deployment.device=$device" sampling.max_response_tokens=32 --repeats "${REPEATS:-2}" --out "$out/engine-random" ;;
    vllm)
        ASYNCSPEC_VLLM_PYTHON=$(command -v python3)
        export ASYNCSPEC_VLLM_PYTHON
        [ "$device" = cpu ] || export DEVICE=cuda:0
        python3 -m pytest -q -n 0 tests/test_vllm.py -m vllm -k "not ranks and not GPUs and not run" > "$out/vllm.txt" 2>&1 \
            || failed=1
        tail -1 "$out/vllm.txt"
        asyncspec bench vllm "deployment.device=$device" --repeats "${REPEATS:-2}" --out "$out/vllm" ;;
    esac
done
rm -rf "$out/policy"
exit $failed
