"""The JSON that clients get, in OpenAI's form."""

from __future__ import annotations

import json
import secrets
import time
from itertools import accumulate
from typing import Any

from starlette.responses import Response

from asyncspec import __version__
from asyncspec.serve.asks import Ask, Model, Refused
from asyncspec.serve.calls import Call, Choice

_KINDS = {401: "authentication_error", 429: "rate_limit_error", 500: "server_error", 504: "server_error"}


def dump(content: Any) -> str:
    return json.dumps(content, separators=(",", ":"))


def answer(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(dump(content), status, headers, "application/json")


def error(refused: Refused) -> dict[str, Any]:
    kind = _KINDS.get(refused.status, "invalid_request_error")
    return {"error": {"message": str(refused), "type": kind, "param": refused.param, "code": refused.code}}


def refusal(refused: Refused) -> Response:
    headers = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}}.get(refused.status)
    return answer(error(refused), refused.status, headers)


def models(model: Model, created: int) -> dict[str, Any]:
    limits = model.limits
    card = {
        "id": model.name,
        "object": "model",
        "created": created,
        "owned_by": "asyncspec",
        "max_model_len": limits.whole_tokens or limits.prompt_tokens + limits.response_tokens,
    }
    return {"object": "list", "data": [card]}


class Writer:
    """Writes what one call has as JSON."""

    def __init__(self, call: Call, model: Model) -> None:
        self._call, self._model, chat = call, model, call.ask.chat
        self._id = ("chatcmpl-" if chat else "cmpl-") + secrets.token_hex(12)
        self._created = int(time.time())

    def _head(self, chunk: bool) -> dict[str, Any]:
        kind = ("chat.completion.chunk" if chunk else "chat.completion") if self._call.ask.chat else "text_completion"
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model.name,
            "system_fingerprint": f"asyncspec-{__version__}",
        }

    def whole(self) -> dict[str, Any]:
        """Return the answer to a request that is no stream."""
        choices = []
        for index, choice in enumerate(self._call.choices):
            said = (
                {"message": {"role": "assistant", "content": choice.text, "refusal": None}}
                if self._call.ask.chat
                else {"text": choice.text}
            )
            logprobs = self._logprobs(choice, 0)
            choices.append({"index": index, **said, "logprobs": logprobs, "finish_reason": choice.finish})
        return {**self._head(False), "choices": choices, "usage": self.usage()}

    def tokens(self) -> dict[str, Any]:
        """Return the answer to a request of tokens: what was sampled, with the token that ended it, in vLLM's form."""
        choices = []
        for index, choice in enumerate(self._call.choices):
            content = [
                {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
                for token, logprob in zip(choice.sampled, choice.sampled_logprobs)
            ]
            choices.append(
                {
                    "index": index,
                    "token_ids": choice.sampled,
                    "logprobs": {"content": content},
                    "finish_reason": choice.finish,
                }
            )
        return {"request_id": self._id, "choices": choices, "prompt_logprobs": None}

    def began(self) -> list[dict[str, Any]]:
        """Return the chunks with which a stream of a chat begins."""
        if not self._call.ask.chat:
            return []
        return [
            self._chunk(index, {"delta": {"role": "assistant", "content": ""}}, None, None)
            for index in range(len(self._call.choices))
        ]

    def grew(self, index: int, text: str, before: int) -> list[dict[str, Any]]:
        """Return the chunks for a choice that has grown.

        Args:
            text: its new text.
            before: its number of tokens before.
        """
        choice, chat = self._call.choices[index], self._call.ask.chat
        logprobs = self._logprobs(choice, before) if len(choice.tokens) > before else None
        chunks = []
        if text or logprobs is not None:
            said = {"delta": {"content": text}} if chat else {"text": text}
            chunks.append(self._chunk(index, said, logprobs, None))
        if choice.finish is not None:
            chunks.append(self._chunk(index, {"delta": {}} if chat else {"text": ""}, None, choice.finish))
        return chunks

    def ended(self) -> list[dict[str, Any]]:
        """Return the chunks with which a stream ends."""
        return [{**self._head(True), "choices": [], "usage": self.usage()}] if self._call.ask.usage else []

    def usage(self) -> dict[str, Any]:
        ask, choices = self._call.ask, self._call.choices
        prompt, response = sum(map(len, ask.prompts)), sum(choice.used for choice in choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": response,
            "total_tokens": prompt + response,
            # OpenAI's names for what a draft proposed
            "completion_tokens_details": {
                "accepted_prediction_tokens": sum(choice.accepted for choice in choices),
                "rejected_prediction_tokens": sum(choice.rejected for choice in choices),
            },
        }

    def _chunk(self, index: int, said: dict, logprobs: Any, finish: str | None) -> dict[str, Any]:
        more = {"usage": None} if self._call.ask.usage else {}
        choice = {"index": index, **said, "logprobs": logprobs, "finish_reason": finish}
        return {**self._head(True), "choices": [choice], **more}

    def _logprobs(self, choice: Choice, before: int) -> dict[str, Any] | None:
        """Return the logprobs of a choice's tokens from this one on, if the client asked for them."""
        ask: Ask = self._call.ask
        if not ask.logprobs:
            return None
        decode = self._model.tokenizer.decode
        texts = [decode([token], skip_special_tokens=False) for token in choice.tokens[before:]]
        found = list(zip(texts, choice.logprobs[before:]))
        if ask.chat:
            content = [
                {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
                for text, logprob in found
            ]
            return {"content": content, "refusal": None}
        first = len(decode(choice.tokens[:before], skip_special_tokens=False))
        offsets = list(accumulate(map(len, texts[:-1]), initial=first)) if texts else []
        return {
            "tokens": [text for text, _ in found],
            "token_logprobs": [logprob for _, logprob in found],
            "top_logprobs": None,
            "text_offset": offsets,
        }
