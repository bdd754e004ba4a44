"""One request of a client while the engine works on it: its samples, their texts, and how it ends."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from functools import partial

from tokenizers import Tokenizer

from asyncspec.engine.protocol import Completion, Partial, Request
from asyncspec.serve.asks import Ask, Model, Refused
from asyncspec.serve.worker import Worker

_IDS = itertools.count()
_UNFINISHED = "\ufffd"  # a character of which not all bytes have come is decoded to this


class Choice:
    """One sample of a request, with what has been generated so far."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._tokenizer, self._stops = tokenizer, stops
        self.text, self.tokens, self.logprobs = "", [], []  # what the client gets
        self.sampled: list[int] = []  # all tokens that were sampled for it, with the one that ends the response
        self.sampled_logprobs: list[float] = []
        self.finish: str | None = None  # why it ended, as OpenAI says it
        self.accepted = self.rejected = 0  # proposed tokens

    @property
    def used(self) -> int:
        """The number of tokens that were sampled for the client."""
        return len(self.sampled)

    def grow(self, found: Partial | Completion) -> str:
        """Take what the engine has; return the text that is new.

        Text that may yet become a stop string, or part of a character, is held back until it is known.
        """
        tokens, ended = found.tokens.tolist(), isinstance(found, Completion)
        sampled = tokens
        if ended and not found.truncated:
            tokens = tokens[:-1]  # the token that ended it has no text
        known, text = len(self.tokens), None
        self.tokens, self.sampled = tokens, sampled
        if self._stops:
            for count in range(known + 1, len(tokens) + 1):
                text = self._decode(tokens[:count])
                if (end := min((at for stop in self._stops if (at := text.find(stop)) >= 0), default=-1)) >= 0:
                    self.tokens = self.sampled = tokens[:count]
                    self.finish, text = "stop", text[:end]
                    break
        text = self._decode(tokens) if text is None else text
        self.sampled_logprobs = found.logprobs[: len(self.sampled)].tolist()
        self.logprobs = self.sampled_logprobs[: len(self.tokens)]
        if ended:
            self.finish = self.finish or ("length" if found.truncated else "stop")
            self.accepted, self.rejected = found.accepted, found.proposed - found.accepted
        if self.finish is None:
            text = self._settled(text)
        new = text[len(self.text) :] if text.startswith(self.text) else ""
        self.text = text if self.finish is not None else self.text + new
        return new

    def _decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens)

    def _settled(self, text: str) -> str:
        """Return the text without an end that may change."""
        text = text.rstrip(_UNFINISHED)
        longest = max(map(len, self._stops), default=1) - 1
        for count in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-count:]) for stop in self._stops):
                return text[:-count]
        return text


class Call:
    """A request in the engine. Use it as a context: at its end no sample of it is left in the engine."""

    def __init__(self, ask: Ask, model: Model, worker: Worker) -> None:
        self.ask, self._worker = ask, worker
        self._queue: asyncio.Queue[Partial | Completion | Exception] = asyncio.Queue()
        first, counts = next(_IDS), [len(seeds) for seeds in ask.seeds]
        self._ids = [first, *(next(_IDS) for _ in counts[1:])]
        self._first = dict(zip(self._ids, itertools.accumulate([0, *counts])))  # request -> its first choice
        self.choices = [Choice(model.tokenizer, ask.stops) for _ in range(ask.choices)]
        self._own = None if ask.sampling == model.sampling else ask.sampling

    def __enter__(self) -> Call:
        ask, tell = self.ask, _teller(asyncio.get_running_loop(), self._queue)
        watched = ask.stream or bool(ask.stops)
        for request_id, prompt, seeds in zip(self._ids, ask.prompts, ask.seeds):
            self._worker.submit(Request(request_id, prompt, seeds, ask.most_tokens, self._own), tell, watched)
        return self

    def __exit__(self, *error) -> None:
        for request_id in self._ids:
            if any(choice.finish is None for choice in self._of(request_id)):
                self._worker.cancel(request_id)

    def _of(self, request_id: int) -> list[Choice]:
        first = self._first[request_id]
        return self.choices[first : first + len(self.ask.seeds[self._ids.index(request_id)])]

    async def run(self) -> AsyncIterator[tuple[int, str, int]]:
        """Yield (number of a choice, its new text, its tokens before) as choices grow, until all have ended.

        Raises:
            Refused: the engine refused the request, or has failed.
        """
        left = len(self.choices)
        while left:
            found = await self._queue.get()
            if isinstance(found, ValueError):
                raise Refused(str(found)[:300])
            if isinstance(found, Exception):
                raise Refused(str(found), status=500)
            index = self._first[found.request_id] + found.sample
            choice = self.choices[index]
            if choice.finish is not None:  # the engine had gone on beyond a stop string
                continue
            before = len(choice.tokens)
            text = choice.grow(found)
            if choice.finish is not None:
                left -= 1
                if not isinstance(found, Completion):
                    self._worker.cancel(found.request_id, found.sample)
            yield index, text, before


def _teller(loop: asyncio.AbstractEventLoop, waiting: asyncio.Queue) -> Callable[[object], None]:
    def tell(found) -> None:
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(partial(waiting.put_nowait, found))

    return tell
