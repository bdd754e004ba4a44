"""The endpoint of a generator: services that play episodes themselves ask the policy here, turn by turn.

Each episode has a key of its own, so a request tells by its key which conversation it goes on with. What it asks for is
handed to the generator's own thread, which alone touches the engine and the conversations:

    event loop          request, key -> episode   handed over   .............................   answered
    generator's thread                                taken | submitted | poll | poll | told

A service must sample as the run does: with its temperature, top-p and top-k, one answer a request. Streams come in one
piece, when the answer is there.
"""

from __future__ import annotations

import queue
import secrets
import socket
import threading
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request as HttpRequest

from asyncspec.config import Config, resolve_path
from asyncspec.engine.protocol import Request
from asyncspec.environments.rendering import Renderer
from asyncspec.models.shape import PolicyShape
from asyncspec.serve.app import STOP_S, Server, http_server
from asyncspec.serve.asks import Limits, Model, Refused
from asyncspec.serve.worker import Tell
from asyncspec.speculation.verify import Sampling

NAME = "policy"  # of the model, for services
ANY = 1 << 30  # tokens of a request


@dataclass
class Asked:
    """A turn that a service asks for; or, without `tell`, that it does not want any more.

    messages: the conversation so far; None: it was given as text or tokens.
    text: the conversation so far as text; None: it was given as messages or tokens.
    tokens: the conversation so far; of messages and text it is only a rendering: the tokens that were kept count.
    """

    episode: Hashable
    request_id: int
    tell: Tell | None
    messages: list[dict[str, Any]] | None = None
    text: str | None = None
    tokens: list[int] = field(default_factory=list)
    most_tokens: int = 1
    stops: tuple[str, ...] = ()


class Endpoint:
    """Serves in a thread of its own from `start` to `close`. All other calls are from the generator's thread."""

    def __init__(self, model: Model, host: str, port: int = 0) -> None:
        """
        Args:
            model: with limits of a whole conversation.
            host, port: to listen on; port 0: a free one.

        Raises:
            OSError: the address cannot be used.
        """
        self.model = model
        self._asked: queue.SimpleQueue[Asked] = queue.SimpleQueue()
        self._episodes: dict[str, Hashable] = {}  # by key
        self._keys: dict[Hashable, str] = {}
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        self._listener = socket.create_server((host, port), family=family)
        shown = f"[{host}]" if ":" in host else host
        self.root = f"http://{shown}:{self._listener.getsockname()[1]}"
        app = _Server(model, self._asked, self._episodes, host).app
        self._http = http_server(app)
        self._thread = threading.Thread(target=self._http.run, args=([self._listener],), name="endpoint", daemon=True)

    @classmethod
    def of(cls, config: Config, renderer: Renderer) -> Endpoint:
        """Make the endpoint of a generator. It is not started.

        Raises:
            OSError: its address cannot be used.
        """
        c, shape = config.sampling, PolicyShape.from_hf(resolve_path(config.model.path), config.model.backend)
        room = config.engine.max_prompt_tokens + c.max_response_tokens
        limits = Limits(
            ANY,  # the generator decides whether there is room, and cuts the episode off if not
            c.max_response_tokens,
            1,
            config.episodes,
            config.environment.episode_timeout_s,
            whole_tokens=room,
        )
        model = Model(
            NAME,
            renderer.tokenizer,
            renderer.template,
            renderer.variables,
            shape.vocab_size,
            Sampling(c.temperature, c.top_p, c.top_k),
            limits,
            tuple(shape.eos_token_ids),
        )
        return cls(model, config.environment.host, config.environment.port)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._http.should_exit = True
        self._thread.join(2 * STOP_S)
        self._listener.close()

    def open(self, episode: Hashable) -> dict[str, str]:
        """Return how a service reaches the policy for an episode. What it was told before is void."""
        self.shut(episode)
        key = self._keys[episode] = secrets.token_urlsafe(24)
        self._episodes[key] = episode
        return {"base_url": f"{self.root}/v1", "api_key": key, "model": self.model.name}

    def shut(self, episode: Hashable) -> None:
        """Answer no more requests for an episode."""
        if (key := self._keys.pop(episode, None)) is not None:
            del self._episodes[key]

    def take(self) -> list[Asked]:
        """Return what services have asked for since the last call."""
        found = []
        while not self._asked.empty():
            found.append(self._asked.get())
        return found


class _Handing:
    """Stands where a server's worker does: hands a request over to the generator's thread."""

    def __init__(self, asked: queue.SimpleQueue[Asked], episode: Hashable, stops: tuple[str, ...], body: Any) -> None:
        self._asked, self._episode, self._stops, self._body = asked, episode, stops, body

    def submit(self, request: Request, tell: Tell, watched: bool) -> None:
        if request.sampling is not None or len(request.seeds) != 1:
            tell(ValueError("temperature, top_p, top_k and n: expected those of the run and one answer, or nothing"))
            return
        prompt = self._body.get("prompt")
        asked = Asked(
            self._episode,
            request.request_id,
            tell,
            self._body.get("messages"),
            prompt if isinstance(prompt, str) else None,
            list(request.prompt),
            request.max_response_tokens,
            self._stops,
        )
        self._asked.put(asked)

    def cancel(self, request_id: int, sample: int | None = None) -> None:
        self._asked.put(Asked(self._episode, request_id, None))


class _Server(Server):
    def __init__(self, model: Model, asked: queue.SimpleQueue[Asked], episodes: dict[str, Hashable], host: str) -> None:
        super().__init__(model, None, 0, host, "")
        self._asked, self._episodes = asked, episodes

    def _authorize(self, request: HttpRequest) -> None:
        scheme, _, shown = request.headers.get("authorization", "").partition(" ")
        # keys are random and never compared letter by letter, so how long a look-up takes tells nothing
        if scheme.lower() != "bearer" or (episode := self._episodes.get(shown.strip())) is None:
            raise Refused(
                "Authorization: expected Bearer and the key of an episode", status=401, code="invalid_api_key"
            )
        request.state.episode = episode

    def _worker_of(self, request: HttpRequest, body: Any) -> _Handing:
        if body.get("chat_template_kwargs"):
            said = "chat_template_kwargs: expected nothing; the run's data.template_variables count"
            raise Refused(said, "chat_template_kwargs")
        stops = body.get("stop") or body.get("sampling_params", {}).get("stop") or ()
        stops = (stops,) if isinstance(stops, str) else tuple(stops)
        return _Handing(self._asked, request.state.episode, stops, body)
