#!/usr/bin/env python3
"""Run vLLM on a CPU with one of our EAGLE-3 drafts. Usage: vllm_eagle3.py MODEL_DIR DRAFT_DIR K < request.

In:  {"prompts": [[token, ...], ...], "max_tokens": ..., "temperature": ...}
Out: {"drafts": verifications, "accepted": accepted proposals, "accepted_by_position": [...]}
"""

import json
import os
import sys
import tempfile
from pathlib import Path

from common import answers


def main() -> None:
    stream, request = answers(), json.load(sys.stdin)
    directory, draft, k = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    from asyncspec.engine import vllm_process
    from asyncspec.models.widen import widened

    vllm_process.prepare(1)
    import vllm

    vllm_process.repair_rejection_sampler()
    config = json.loads((directory / "config.json").read_text())
    factor = vllm_process.head_factor(config["head_dim"])
    with tempfile.TemporaryDirectory() as folder:
        wide = {name: Path(folder) / name for name in ("policy", "draft")}
        widened(directory, wide["policy"], factor)
        widened(draft, wide["draft"], factor)
        llm = vllm.LLM(
            str(wide["policy"]),
            dtype="float32",
            max_model_len=512,
            max_num_seqs=64,
            enforce_eager=True,
            skip_tokenizer_init=True,
            disable_log_stats=False,
            async_scheduling=False,
            speculative_config={
                "method": "eagle3",
                "model": str(wide["draft"]),
                "num_speculative_tokens": k,
                "draft_sample_method": "probabilistic",
            },
        )
        llm.generate(
            [{"prompt_token_ids": prompt} for prompt in request["prompts"]],
            vllm.SamplingParams(
                temperature=request["temperature"],
                max_tokens=request["max_tokens"],
                detokenize=False,
                stop_token_ids=[config["eos_token_id"]],
            ),
            use_tqdm=False,
        )
        found = {metric.name: metric for metric in llm.get_metrics()}
    stream.write(
        json.dumps(
            {
                "drafts": found["vllm:spec_decode_num_drafts"].value,
                "accepted": found["vllm:spec_decode_num_accepted_tokens"].value,
                "accepted_by_position": found["vllm:spec_decode_num_accepted_tokens_per_pos"].values,
            }
        )
        + "\n"
    )
    stream.flush()


if __name__ == "__main__":
    main()
