#!/usr/bin/env bash
# Train the shipped policy on data of your own with a reward of your own.
set -euo pipefail
cd "$(dirname "$0")" # data.reward is imported from the current directory
asyncspec train --steps 20 --run-dir "${RUN:-runs/example-own-reward}" deployment.device=cpu \
    data.train_file=train.jsonl data.eval_file=eval.jsonl data.reward=reward:short_and_right "$@"
