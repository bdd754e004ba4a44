"""Generates with vLLM for bench vllm, in a process and an environment of its own, one JSON line in, one out.

In:  {"live": sequences at once, "length": draft length or "auto", "rollouts": how many to end, "first": their numbers}
Out: {"tokens": of the rollouts that ended, "seconds": until then, "acceptance_length": ...}

Usage: python -m asyncspec.bench.vllm_worker SLOTS FIELD=VALUE...
"""

from __future__ import annotations

import json
import os
import sys
import time


def main() -> None:
    stream = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the libraries print goes to stderr
    slots, *overrides = sys.argv[1:]
    from asyncspec import config as configuration
    from asyncspec.actors.engines import make_engine
    from asyncspec.engine.protocol import Request
    from asyncspec.loading import use_threads
    from asyncspec.models import tokenizer
    from asyncspec.speculation.draft_length import FixedLength
    from asyncspec.tasks.sums import sums

    c = configuration.load("tiny", ["engine.kind=vllm", f"engine.slots={slots}", *overrides])
    use_threads(c.engine.threads)
    encoder = tokenizer.load(configuration.resolve_path(c.model.path))
    prompts = [tokenizer.encode_prompt(encoder, problem.prompt) for problem in sums(c.seed + 77, 1024)]
    engine = make_engine(c, "cpu" if c.deployment.device != "cuda" else "cuda:0", 0)
    auto = engine.lengths.chooser if engine.lengths is not None else None

    def generate(live: int, length: int | str, rollouts: int, first: int) -> dict:
        if engine.lengths is not None:
            engine.lengths.chooser = auto if length == "auto" else FixedLength(int(length))
        began, submitted, done = time.perf_counter(), 0, []
        while len(done) < rollouts:
            while engine.live + engine.waiting < live and submitted < rollouts:
                number = first + submitted
                request = Request(number, prompts[number % len(prompts)], [number], c.sampling.max_response_tokens)
                engine.submit(request)
                submitted += 1
            done += engine.poll()
        seconds = time.perf_counter() - began
        tokens = sum(len(completion.tokens) for completion in done)
        verifications = sum(completion.verifications for completion in done)
        return {
            "tokens": tokens,
            "seconds": seconds,
            "acceptance_length": (tokens - len(done)) / verifications if verifications else 1.0,
        }

    def say(answer: dict) -> None:
        stream.write(json.dumps(answer) + "\n")
        stream.flush()

    say({})
    for line in sys.stdin:
        say(generate(**json.loads(line)))


if __name__ == "__main__":
    main()
