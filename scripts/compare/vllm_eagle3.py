#!/usr/bin/env python3
"""vLLM on a CPU drafting with an EAGLE-3 draft of ours. Usage: vllm_eagle3.py MODEL_DIR DRAFT_DIR K < request.

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
    os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1",
                   "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    import vllm
    from vllm.v1.sample import rejection_sampler

    from widen import widened

    def expand(x, cu_num_tokens, num_tokens, replace_from=0, replace_to=0):
        repeated = x.repeat_interleave(cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1)))
        return repeated.masked_fill(repeated == replace_from, replace_to) if replace_from != replace_to else repeated

    # vLLM 0.32's kernel for this on CPUs writes into a copy where x is not int64: temperatures come out as whatever memory held.
    rejection_sampler.expand_batch_to_tokens = expand

    with tempfile.TemporaryDirectory() as folder:
        wide = {name: Path(folder) / name for name in ("policy", "draft")}
        widened(directory, wide["policy"])
        widened(draft, wide["draft"])
        llm = vllm.LLM(
            str(wide["policy"]), dtype="float32", max_model_len=512, max_num_seqs=64, enforce_eager=True, skip_tokenizer_init=True,
            disable_log_stats=False, async_scheduling=False, speculative_config={
                "method": "eagle3", "model": str(wide["draft"]), "num_speculative_tokens": k, "draft_sample_method": "probabilistic"})
        stop = json.loads((directory / "config.json").read_text())["eos_token_id"]
        llm.generate([{"prompt_token_ids": prompt} for prompt in request["prompts"]], vllm.SamplingParams(
            temperature=request["temperature"], max_tokens=request["max_tokens"], detokenize=False, stop_token_ids=[stop]), use_tqdm=False)
        found = {metric.name: metric for metric in llm.get_metrics()}
    stream.write(json.dumps({
        "drafts": found["vllm:spec_decode_num_drafts"].value, "accepted": found["vllm:spec_decode_num_accepted_tokens"].value,
        "accepted_by_position": found["vllm:spec_decode_num_accepted_tokens_per_pos"].values}) + "\n")
    stream.flush()


if __name__ == "__main__":
    main()
