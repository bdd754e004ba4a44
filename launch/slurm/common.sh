# The scripts beside this one source it. It sets nodes, first (the first of the nodes) and port, and defines `launch`.
# shellcheck shell=bash
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
# shellcheck disable=SC2034
first=${nodes[0]}
# shellcheck disable=SC2034
port=$((20000 + SLURM_JOB_ID % 20000))  # jobs that share a node must not share a port

# Run a launcher and exit with its code. Slurm's warning before the time limit interrupts it, so that it writes a
# checkpoint.
launch() {
    "$@" &
    local launcher=$! warned=yes code
    trap 'warned=yes; kill -TERM $launcher || true' TERM
    while [ "$warned" ]; do
        warned=""
        code=0
        wait $launcher || code=$?  # a warning ends this wait, but not the launcher: wait again for its code
    done
    exit $code
}
