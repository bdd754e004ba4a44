"""What a client asks for: the body of a request, checked. Nothing in it is ignored silently.

A field that OpenAI's API has and this server has not is accepted with the value that changes nothing.
"""

from __future__ import annotations

import difflib
import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from asyncspec.models.chat import GIVEN, ChatTemplate
from asyncspec.models.tokenizer import encode_prompt
from asyncspec.speculation.verify import GREEDY, Sampling

MOST_STOPS, LONGEST_STOP = 8, 200  # strings that end a response, and characters of one
LEAST_TEMPERATURE = 1e-3  # below it the most probable token has all the probability
# Fields with the values that change nothing; None always changes nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
}
_NOTES = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls")
_BOTH = (
    *("model", "max_tokens", "temperature", "top_p", "top_k", "n", "stop", "seed", "stream", "stream_options"),
    "logprobs",
)
TOKENS = ("model", "token_ids", "sampling_params", "stream", "cache_salt", "priority", "request_id")
_PARAMS = ("temperature", "top_p", "top_k", "max_tokens", "seed", "logprobs", "n", "stop_token_ids", "stop")
_UNUSED_PARAMS: dict[str, tuple[Any, ...] | None] = {  # with the values that change nothing; None: any whole number
    "routed_experts_prompt_start": None,  # of what is never returned
    "skip_special_tokens": (False, True),
    "spaces_between_special_tokens": (False, True),
    "detokenize": (False, True),
    "min_tokens": (0,),
    "min_p": (0,),
    "repetition_penalty": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "prompt_logprobs": (),
}
CHAT = (*_BOTH, "messages", "max_completion_tokens", "chat_template_kwargs")
COMPLETION = (*_BOTH, "prompt")


class Refused(Exception):
    """A request that gets an error; the message is one line."""

    def __init__(self, message: str, param: str | None = None, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.param, self.status, self.code = param, status, code


@dataclass(frozen=True)
class Limits:
    """Bounds of one request, and of all."""

    prompt_tokens: int
    response_tokens: int
    choices: int  # samples of one request
    waiting: int  # samples that wait for a slot
    timeout_s: float  # of a request
    body_bytes: int = 4 << 20
    whole_tokens: int = 0  # of a prompt and its response together; 0: as many as both may have


@dataclass(frozen=True)
class Model:
    """What is needed to understand requests for the served model."""

    name: str
    tokenizer: Tokenizer
    template: ChatTemplate | None
    variables: Mapping[str, Any]  # of the chat template
    vocabulary: int
    sampling: Sampling  # of requests that do not say
    limits: Limits
    stop_tokens: tuple[int, ...] = ()  # that end a response


@dataclass(frozen=True)
class Ask:
    chat: bool
    prompts: list[list[int]]
    seeds: list[list[int]]  # of each prompt's samples
    most_tokens: int
    sampling: Sampling
    stops: tuple[str, ...]
    stream: bool
    usage: bool  # whether a stream ends with the usage
    logprobs: bool

    @property
    def choices(self) -> int:
        return sum(map(len, self.seeds))


def understand(body: Any, model: Model, chat: bool) -> Ask:
    """Turn the body of a request into what to do.

    Args:
        body: the parsed JSON.
        chat: whether it was sent to /v1/chat/completions.

    Raises:
        Refused: a field is wrong or not supported; the message names it, its value and what was expected.
    """
    if not isinstance(body, dict):
        raise Refused("the body: expected a JSON object")
    known = CHAT if chat else COMPLETION
    body = {name: value for name, value in body.items() if value is not None}
    for name, value in body.items():
        _check_name(name, value, known)
    if body.get("model") != model.name:
        raise Refused(f"model={body.get('model')!r}: expected {model.name!r}", "model", 404, "model_not_found")
    limits, count = model.limits, _whole(body, "n", 1, 1, model.limits.choices)
    prompts = [_chat_prompt(body, model)] if chat else _prompts(body, model)
    if len(prompts) * count > limits.choices:
        raise Refused(
            f"prompt: {len(prompts)} prompts with n={count}; expected at most {limits.choices} choices", "prompt"
        )
    if (longest := max(map(len, prompts))) > limits.prompt_tokens:
        raise Refused(
            f"{'messages' if chat else 'prompt'}: {longest} tokens; expected at most {limits.prompt_tokens} "
            "(engine.max_prompt_tokens of the server)",
            "messages" if chat else "prompt",
            code="context_length_exceeded",
        )
    options = body.get("stream_options", {})
    if not isinstance(options, dict) or {*options} - {"include_usage", "include_obfuscation"}:
        raise Refused(f"stream_options={options!r}: expected an object with include_usage", "stream_options")
    first = _whole(body, "seed", None, -(2**63), 2**63 - 1)
    first = secrets.randbits(62) if first is None else first
    return Ask(
        chat=chat,
        prompts=prompts,
        seeds=[[_seed(first + count * i + j) for j in range(count)] for i in range(len(prompts))],
        most_tokens=_most_tokens(body, limits),
        sampling=_sampling(body, model.sampling),
        stops=_stops(body),
        stream=_flag(body, "stream"),
        usage=_flag(options, "include_usage"),
        logprobs=_logprobs(body, chat),
    )


def understand_tokens(body: Any, model: Model) -> Ask:
    """Turn the body of a request of tokens, in vLLM's form, into what to do.

    Raises:
        Refused: as `understand`.
    """
    if not isinstance(body, dict):
        raise Refused("the body: expected a JSON object")
    body = {name: value for name, value in body.items() if value is not None}
    for name in body:
        if name not in TOKENS:
            near = difflib.get_close_matches(name, TOKENS, 1)
            raise Refused(f"{_short(name)[1:-1]}: no such field" + (f"; nearest: {near[0]}" if near else ""), name)
    params = body.get("sampling_params", {})
    if not isinstance(params, dict):
        raise Refused(f"sampling_params={_short(params)}: expected an object", "sampling_params")
    params = {name: value for name, value in params.items() if value is not None}
    for name, value in params.items():
        if name in _UNUSED_PARAMS:
            neutral = _UNUSED_PARAMS[name]
            if (type(value) is int and value >= 0) if neutral is None else value in neutral:
                continue
        if name not in _PARAMS:
            raise Refused(f"sampling_params.{_short(name)[1:-1]}={_short(value)}: not supported", "sampling_params")
    stops = params.get("stop_token_ids", [])
    if not isinstance(stops, list) or not {*stops} <= {*model.stop_tokens}:
        expected = f"some of the model's own, {', '.join(map(str, model.stop_tokens))}"
        raise Refused(f"sampling_params.stop_token_ids={_short(stops)}: expected {expected}", "sampling_params")
    if params.get("logprobs", 1) not in (0, 1):
        raise Refused(f"sampling_params.logprobs={_short(params['logprobs'])}: expected 1", "sampling_params")
    if not isinstance(body.get("token_ids"), list):
        raise Refused(f"token_ids={_short(body.get('token_ids'))}: expected a list of tokens", "token_ids")
    if params.get("top_k") == -1:  # in vLLM's form it means all tokens
        params["top_k"] = 0
    asked = {
        name: params[name]
        for name in ("temperature", "top_p", "top_k", "max_tokens", "seed", "n", "stop")
        if name in params
    }
    plain = {"model": body.get("model"), "prompt": body["token_ids"], "logprobs": 0, **asked}
    found = understand(plain | {"stream": body.get("stream", False)}, model, False)
    if found.stream:
        raise Refused("stream=True: not supported with tokens; expected false, or nothing", "stream")
    return found


def _check_name(name: str, value: Any, known: Sequence[str]) -> None:
    if name in known or name in _NOTES:
        return
    if name in _NEUTRAL:
        if value not in _NEUTRAL[name]:
            expected = " or ".join(repr(neutral) for neutral in _NEUTRAL[name])
            raise Refused(f"{name}={_short(value)}: not supported; expected {expected}, or nothing", name)
        return
    near = difflib.get_close_matches(name, known, 1)
    raise Refused(f"{_short(name)[1:-1]}: no such field" + (f"; nearest: {near[0]}" if near else ""), name)


def _number(body: Mapping[str, Any], name: str, default: Any, least: float, most: float) -> Any:
    if name not in body:
        return default
    value = body[name]
    held = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not held or not least <= value <= most:
        raise Refused(f"{name}={_short(value)}: expected a number from {least:g} to {most:g}", name)
    return value


def _whole(body: Mapping[str, Any], name: str, default: Any, least: int, most: int) -> Any:
    if name not in body:
        return default
    value = body[name]
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise Refused(f"{name}={_short(value)}: expected a whole number from {least} to {most}", name)
    return value


def _flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name, False)
    if not isinstance(value, bool):
        raise Refused(f"{name}={_short(value)}: expected true or false", name)
    return value


def _most_tokens(body: Mapping[str, Any], limits: Limits) -> int:
    if {"max_tokens", "max_completion_tokens"} <= {*body}:
        raise Refused("max_tokens: expected either max_tokens or max_completion_tokens", "max_tokens")
    name = "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"
    return _whole(body, name, limits.response_tokens, 1, limits.response_tokens)


def _sampling(body: Mapping[str, Any], usual: Sampling) -> Sampling:
    temperature = _number(body, "temperature", usual.temperature, 0, 2)
    if "top_p" in body and not _number(body, "top_p", 1, 0, 1) > 0:
        raise Refused(f"top_p={body['top_p']!r}: expected a number above 0, up to 1", "top_p")
    if temperature < LEAST_TEMPERATURE:
        return GREEDY
    top_k = _whole(body, "top_k", usual.top_k, 0, 2**31)
    return Sampling(float(temperature), float(body.get("top_p", usual.top_p)), top_k)


def _stops(body: Mapping[str, Any]) -> tuple[str, ...]:
    given = body.get("stop", [])
    stops = [given] if isinstance(given, str) else given
    held = isinstance(stops, list) and len(stops) <= MOST_STOPS
    if not held or not all(isinstance(stop, str) and 0 < len(stop) <= LONGEST_STOP for stop in stops):
        expected = f"a string, or at most {MOST_STOPS} of them, each of 1 to {LONGEST_STOP} characters"
        raise Refused(f"stop={_short(given)}: expected {expected}", "stop")
    return tuple(dict.fromkeys(stops))


def _logprobs(body: Mapping[str, Any], chat: bool) -> bool:
    if chat:
        return _flag(body, "logprobs")
    if "logprobs" not in body:
        return False
    if body["logprobs"] != 0 or isinstance(body["logprobs"], bool):
        raise Refused(
            f"logprobs={_short(body['logprobs'])}: expected 0, which gives the logprob of each sampled token; those "
            "of other tokens are not kept",
            "logprobs",
        )
    return True


def _seed(number: int) -> int:
    """Return a number as one of 64 bits, with a sign."""
    return (number + 2**63) % 2**64 - 2**63


def _prompts(body: Mapping[str, Any], model: Model) -> list[list[int]]:
    given = body.get("prompt")
    several = isinstance(given, list) and bool(given) and isinstance(given[0], str | list)
    found = []
    for prompt in given if several else [given]:
        if isinstance(prompt, str) and prompt:
            found.append(_encoded(prompt, model, "prompt"))
        elif isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
            if not 0 <= min(prompt) <= max(prompt) < model.vocabulary:
                raise Refused(f"prompt: expected tokens from 0 to {model.vocabulary - 1}", "prompt")
            found.append(prompt)
        else:
            raise Refused(
                f"prompt={_short(given)}: expected text that is not empty, tokens, or a list of one of them", "prompt"
            )
        if len(found) > model.limits.choices:
            raise Refused(f"prompt: expected at most {model.limits.choices} prompts", "prompt")
    return found


def _chat_prompt(body: Mapping[str, Any], model: Model) -> list[int]:
    if model.template is None:
        raise Refused(
            "messages: the model has no chat template; expected a prompt, sent to /v1/completions", "messages"
        )
    given = body.get("messages")
    if not isinstance(given, list) or not given:
        raise Refused(f"messages={_short(given)}: expected a list of objects with role and content", "messages")
    variables = body.get("chat_template_kwargs", {})
    if not isinstance(variables, dict) or {*variables} & {*GIVEN}:
        expected = f"an object without {', '.join(GIVEN)}"
        raise Refused(f"chat_template_kwargs={_short(variables)}: expected {expected}", "chat_template_kwargs")
    try:
        text = model.template.render([_message(each) for each in given], {**model.variables, **variables})
    except ValueError as error:
        raise Refused(f"messages: {str(error)[:300]}", "messages") from None
    return _encoded(text, model, "messages")


def _message(given: Any) -> dict[str, Any]:
    if not isinstance(given, dict) or not isinstance(given.get("role"), str):
        raise Refused(f"messages: {_short(given)}: expected an object with role and content", "messages")
    content = given.get("content")
    if isinstance(content, list):  # parts, of which only text means something to these models
        texts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
        if len(texts) != len(content) or not all(isinstance(text, str) for text in texts):
            raise Refused("messages: expected content as text, or as parts of type text", "messages")
        content = "".join(texts)
    if not isinstance(content, str | None):
        raise Refused(f"messages: content={_short(content)}: expected text", "messages")
    return {**given, "content": content}


def _encoded(text: str, model: Model, param: str) -> list[int]:
    try:
        tokens = encode_prompt(model.tokenizer, text)
    except ValueError as error:
        raise Refused(f"{param}: {ascii(str(error))[1:300]}", param) from None
    if not tokens:
        raise Refused(f"{param}: expected text of at least one token", param)
    if max(tokens) >= model.vocabulary:
        raise Refused(f"{param}: its tokenizer has tokens that the model does not know", param)
    return tokens


def _short(value: Any) -> str:
    """Return a value as text for a message, not longer than a line, in ASCII: it may hold half characters."""
    text = ascii(value)
    return text if len(text) <= 60 else text[:57] + "..."
