# What the scripts beside this one share: they source it. It sets nodes, first (of them) and port, and has `launch`.
# shellcheck shell=bash
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
# shellcheck disable=SC2034
first=${nodes[0]}
# shellcheck disable=SC2034
port=$((20000 + SLURM_JOB_ID % 20000))  # jobs that share a node must not meet

# Run a launcher and end with its code. Slurm's warning before the time limit is an interrupt to it: the checkpoint is written.
launch() {
    "$@" &
    local launcher=$! warned=yes code
    trap 'warned=yes; kill -TERM $launcher || true' TERM
    while [ "$warned" ]; do
        warned=""
        code=0
        wait $launcher || code=$?  # a warning ends this wait, not the launcher: its code is still to come
    done
    exit $code
}
