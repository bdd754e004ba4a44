"""The protocol that the comparison programs share: answer generation requests, one JSON line in, one JSON line out.

In:  {"prompts": [[token, ...], ...], "live": sequences in flight, "max_tokens": ..., "temperature": ...}
Out: {"tokens": total generated, "seconds": from the first request to the last token}
The first line out is {"name": ..., "version": ...}. Whatever the library prints goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
import time


def answers() -> object:
    """Return the stream for answers, and redirect stdout to stderr for all other code."""
    stream = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return stream


def serve(stream, name: str, version: str, generate) -> None:
    """Answer requests until stdin ends.

    Args:
        stream: the stream for answers.
        name, version: the library's.
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
