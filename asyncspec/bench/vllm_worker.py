"""Generates with vLLM for bench vllm, in a process and an environment of its own, one JSON line in, one out.

In:  {"live": sequences in flight, "length": draft length or "auto", "seconds": how long}
Out: {"tokens": a second, "acceptance_length": tokens of a verification}

The sequences in flight stay so between two requests, so a measurement has no beginning and no end with fewer of them.

Usage: python -m asyncspec.bench.vllm_worker SLOTS FIELD=VALUE...
"""

from __future__ import annotations

import json
import os
import sys
import time

SETTLE = 4  # steps before a measurement: a new draft length is proposed in the first and verified in the second


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
    submitted, emitted, verified = 0, 0, 0  # of samples that ended: tokens after the first one, and verifications

    def step(live: int) -> None:
        nonlocal submitted, emitted, verified
        while engine.live + engine.waiting < live:
            prompt = prompts[submitted % len(prompts)]
            engine.submit(Request(submitted, prompt, [submitted], c.sampling.max_response_tokens))
            submitted += 1
        for completion in engine.poll():
            emitted += len(completion.tokens) - 1
            verified += completion.verifications

    def so_far() -> tuple[float, int, int]:
        """Return the time, and of all samples the tokens after their first one, and the verifications."""
        begun = [sample for sample in engine._live.values() if sample.steps]
        tokens, steps = (sum(len(sample.tokens) - 1 for sample in begun), sum(sample.steps - 1 for sample in begun))
        return time.perf_counter(), emitted + tokens, verified + steps

    def generate(live: int, length: int | str, seconds: float) -> dict:
        if engine.lengths is not None:
            engine.lengths.chooser = auto if length == "auto" else FixedLength(int(length))
        while engine.live > live:
            step(0)
        for _ in range(SETTLE):
            step(live)
        began, tokens, steps = so_far()
        while time.perf_counter() < began + seconds:
            step(live)
        ended, more_tokens, more_steps = so_far()
        return {
            "tokens": (more_tokens - tokens) / (ended - began),
            "acceptance_length": (more_tokens - tokens) / max(1, more_steps - steps),
        }

    def say(answer: dict) -> None:
        stream.write(json.dumps(answer) + "\n")
        stream.flush()

    say({})
    for line in sys.stdin:
        say(generate(**json.loads(line)))


if __name__ == "__main__":
    main()
