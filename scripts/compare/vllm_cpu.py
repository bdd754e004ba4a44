#!/usr/bin/env python3
"""Run vLLM on a CPU behind the protocol of common.py. Usage: vllm_cpu.py MODEL_DIR THREADS MAX_LENGTH [--eager]."""

import json
import os
import sys
import tempfile
from pathlib import Path

from common import answers, serve


def main() -> None:
    stream = answers()
    directory, threads, length = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    os.environ |= {"OMP_NUM_THREADS": threads, "VLLM_CPU_KVCACHE_SPACE": "1"}
    from asyncspec.engine import vllm_process
    from asyncspec.models.widen import widened

    vllm_process.prepare(int(threads))
    import torch
    import vllm

    config = json.loads((directory / "config.json").read_text())
    if (factor := vllm_process.head_factor(config["head_dim"])) > 1:
        equal = Path(tempfile.mkdtemp())
        widened(directory, equal, factor)
        directory = equal
    torch.set_num_threads(int(threads))
    engine = vllm.LLM(
        str(directory),
        dtype="float32",
        max_model_len=int(length),
        max_num_seqs=64,
        enforce_eager="--eager" in sys.argv,
        skip_tokenizer_init=True,
        disable_log_stats=True,
    ).llm_engine
    torch.set_num_threads(int(threads))
    sent = 0

    def generate(prompts, live, max_tokens, temperature) -> int:
        nonlocal sent
        params = vllm.SamplingParams(
            temperature=temperature, max_tokens=max_tokens, detokenize=False, stop_token_ids=[config["eos_token_id"]]
        )
        waiting, running, tokens = list(prompts), 0, 0
        while waiting or running:
            while waiting and running < live:
                sent, running = sent + 1, running + 1
                engine.add_request(str(sent), {"prompt_token_ids": waiting.pop(0)}, params)
            for output in engine.step():
                if output.finished:
                    running -= 1
                    tokens += len(output.outputs[0].token_ids)
        return tokens

    serve(stream, "vllm", vllm.__version__, generate)


if __name__ == "__main__":
    main()
