"""What the comparison programs share: answer generation requests, one JSON line in, one JSON line out.

In:  {"prompts": [[token, ...], ...], "live": sequences in flight, "max_tokens": ..., "temperature": ...}
Out: {"tokens": generated in all, "seconds": from the first request to the last token}
The first line out is {"name": ..., "version": ...}. What the library prints goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
import time


def answers() -> object:
    """The stream for answers; from now on stdout is stderr for everybody else."""
    stream = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return stream


def serve(stream, name: str, version: str, generate) -> None:
    """Answer until stdin ends.

    Args:
        generate: callable(prompts, live, max_tokens, temperature) -> number of tokens.
    """

    def say(**fields) -> None:
        stream.write(json.dumps(fields) + "\n")
        stream.flush()

    say(name=name, version=version)
    for line in sys.stdin:
        request = json.loads(line)
        began = time.perf_counter()
        tokens = generate(request["prompts"], request["live"], request["max_tokens"], request["temperature"])
        say(tokens=tokens, seconds=time.perf_counter() - began)
