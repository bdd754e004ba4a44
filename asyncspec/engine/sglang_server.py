"""A client for an SGLang server: JSON over HTTP, one connection per call, a deadline for each call, one-line errors.

Written after SGLang 0.5.23: entrypoints/http_server.py (paths, status codes), managers/io_struct.py (requests),
managers/tokenizer_manager.py and utils/weight_versions.py (answers). The structs below hold only the fields of answers
that are used. A field that is missing or has another type is an error.
"""

from __future__ import annotations

import dataclasses
import http.client
import json
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from asyncspec.config import Config, resolve_path
from asyncspec.deadlines import SERVER_ASKED_S
from asyncspec.errors import ConfigError, first_line
from asyncspec.models import CheckpointError
from asyncspec.models.policy import PolicyShape

ALGORITHMS = {"none": None, "ngram": "NGRAM"}  # speculation.method -> speculative_algorithm
SAID = 300  # characters of a server's message that are passed on, at most


class ServerError(RuntimeError):
    """A server does not answer, or not as documented; the message is one line."""


class Info(msgspec.Struct):
    """The answer of /server_info: the server's settings."""

    version: str
    model_path: str
    speculative_algorithm: str | None = None
    speculative_num_draft_tokens: int | None = None  # positions of a verification: its proposals, plus one
    speculative_accept_threshold_single: float = 1.0
    speculative_accept_threshold_acc: float = 1.0
    max_req_input_len: int | None = None  # of prompt and response together, less 5
    max_queued_requests: int | None = None
    enable_hierarchical_cache: bool = False


class VersionSpan(msgspec.Struct):
    """Tokens from `start` to before `end` were sampled under `version`."""

    version: str
    start: int
    end: int


class Reason(msgspec.Struct):
    type: str  # stop, length, abort
    message: str | None = None
    matched: int | str | None = None  # the stop token; words if the server's numbers were wrong


class Meta(msgspec.Struct):
    finish_reason: Reason
    completion_tokens: int
    output_token_logprobs: list[tuple[float, int, str | None]]  # logprob, token, text
    weight_versions: list[VersionSpan]
    # Present only if the server speculates and the request was verified.
    spec_verify_ct: int = 0
    spec_num_proposed_drafts: int = 0
    spec_num_correct_drafts: int = 0
    spec_correct_drafts_histogram: list[int] = []  # entry j: verifications that accepted exactly j proposals


class Answer(msgspec.Struct):
    """The answer of /generate."""

    meta_info: Meta


class Updated(msgspec.Struct):
    """The answer of /update_weights_from_disk."""

    success: bool
    message: str


class Server:
    def __init__(self, url: str) -> None:
        """
        Args:
            url: http://HOST:PORT.
        """
        parts = urlsplit(url)
        self.url, self._where = url, (parts.hostname, parts.port)

    def ask(
        self, path: str, body: dict | None = None, answer: type | None = None, within_s: float = SERVER_ASKED_S
    ) -> Any:
        """Make one call; block this thread until the answer or the deadline.

        Args:
            body: what to POST; None: GET.
            answer: the struct to decode the answer into; None: ignore the answer.
            within_s: seconds until the server must accept, and again until it must answer.

        Raises:
            ServerError: the server cannot be reached, does not answer in time, refuses, or answers something else.
        """
        connection = http.client.HTTPConnection(*self._where, timeout=within_s)
        try:
            data, headers = (None, {}) if body is None else (json.dumps(body), {"Content-Type": "application/json"})
            connection.request("GET" if body is None else "POST", path, data, headers)
            response = connection.getresponse()
            content = response.read()
        except TimeoutError:
            raise self._error(path, f"no answer within {within_s:g} s") from None
        except (OSError, http.client.HTTPException) as error:
            raise self._error(path, getattr(error, "strerror", None) or f"{type(error).__name__}: {error}") from None
        finally:
            connection.close()
        if response.status != 200:
            raise self._error(path, f"HTTP {response.status}: {_said(content)}")
        if answer is None:
            return None
        try:
            return msgspec.json.decode(content, type=answer)
        except msgspec.MsgspecError as error:
            raise self._error(path, f"not an answer of SGLang 0.5.23: {first_line(error)}") from None

    def _error(self, path: str, what: str) -> ServerError:
        return ServerError(f"SGLang at {self.url}{path}: {what}")


def _said(content: bytes) -> str:
    """Return the server's message from the body of a refusal."""
    try:
        said = json.loads(content)
        said = said.get("message") or said["error"]
        said = said["message"] if isinstance(said, dict) else said
    except (ValueError, LookupError, TypeError, AttributeError):
        said = content.decode(errors="replace")
    return " ".join(str(said).split())[:SAID] or "no reason given"


def check(config: Config, server: Server) -> None:
    """Compare the server's settings with the configuration.

    Raises:
        ServerError: see `Server.ask`.
        ConfigError: the server serves another architecture, or its speculation has other settings.
    """
    info = server.ask("/server_info", answer=Info)
    backend, field = config.model.backend, f"engine.url={server.url!r}"
    ours = PolicyShape.from_hf(resolve_path(config.model.path), backend)
    start = f"a server started with --model-path {resolve_path(config.model.path).resolve()}"
    try:
        theirs = PolicyShape.from_hf(Path(info.model_path), backend)
    except CheckpointError as error:
        raise ConfigError(f"{field}: serves {info.model_path!r}: {first_line(error)}; expected {start}") from None
    for name, value in dataclasses.asdict(ours).items():
        if getattr(theirs, name) != value:
            raise ConfigError(
                f"{field}: serves {info.model_path!r}, which has {name}={getattr(theirs, name)}; the policy of "
                f"model.path has {value}; "
                f"expected {start}"
            )
    longest = config.engine.max_prompt_tokens + config.sampling.max_response_tokens
    if info.max_req_input_len is not None and info.max_req_input_len + 5 <= longest:
        raise ConfigError(
            f"{field}: takes prompt and response of {info.max_req_input_len + 4} tokens together; expected {longest}, "
            f"those of engine.max_prompt_tokens and sampling.max_response_tokens: a larger --context-length, or more "
            "memory for its KV cache"
        )
    if info.max_queued_requests is not None and info.max_queued_requests < config.engine.slots:
        raise ConfigError(
            f"{field}: started with max_queued_requests={info.max_queued_requests}; expected engine.slots="
            f"{config.engine.slots} or more, since a swap returns all samples to its queue"
        )
    if info.enable_hierarchical_cache:
        raise ConfigError(
            f"{field}: started with --enable-hierarchical-cache, with which it may refuse to empty its cache at a "
            "swap; expected a server without it"
        )
    method, algorithm = config.speculation.method, ALGORITHMS[config.speculation.method]
    if info.speculative_algorithm != algorithm:
        nearest = next((name for name, other in ALGORITHMS.items() if other == info.speculative_algorithm), None)
        raise ConfigError(
            f"speculation.method={method!r}: the server at {server.url} has "
            f"speculative_algorithm={info.speculative_algorithm}; expected "
            f"{algorithm}; nearest valid choice: "
            + (f"speculation.method={nearest}" if nearest else "a server started without it")
        )
    if algorithm is None:
        return
    if info.speculative_num_draft_tokens != int(config.speculation.draft_length) + 1:
        raise ConfigError(
            f"speculation.draft_length={config.speculation.draft_length!r}: the server at {server.url} has "
            f"speculative_num_draft_tokens={info.speculative_num_draft_tokens}; expected one more than the draft "
            f"length; nearest valid "
            f"choice: speculation.draft_length={max(1, (info.speculative_num_draft_tokens or 0) - 1)}"
        )
    for name in ("speculative_accept_threshold_single", "speculative_accept_threshold_acc"):
        if getattr(info, name) != 1.0:
            raise ConfigError(
                f"{field}: started with {name}={getattr(info, name)}, which changes the distribution of samples; "
                f"expected 1.0"
            )
