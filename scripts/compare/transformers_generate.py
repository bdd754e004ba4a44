#!/usr/bin/env python3
"""Run transformers' generate behind the protocol of common.py, in batches of as many sequences as may be live.

Usage: transformers_generate.py MODEL_DIR THREADS.
"""

import sys

from common import answers, serve


def main() -> None:
    stream = answers()
    directory, threads = sys.argv[1:3]
    import torch
    import transformers

    torch.set_num_threads(int(threads))
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    pad = model.config.pad_token_id or 0

    @torch.inference_mode()
    def generate(prompts, live, max_tokens, temperature) -> int:
        tokens = 0
        for start in range(0, len(prompts), live):
            batch = prompts[start : start + live]
            width = max(map(len, batch))
            input_ids = torch.tensor([[pad] * (width - len(p)) + p for p in batch])
            mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in batch])
            output = model.generate(
                input_ids,
                attention_mask=mask,
                do_sample=True,
                temperature=temperature,
                top_k=0,
                top_p=1.0,
                max_new_tokens=max_tokens,
                pad_token_id=pad,
            )[:, width:]
            stop = output == model.config.eos_token_id
            first = torch.where(stop.any(1), stop.int().argmax(1) + 1, output.shape[1])
            tokens += int(first.sum())
        return tokens

    serve(stream, "transformers", transformers.__version__, generate)


if __name__ == "__main__":
    main()
