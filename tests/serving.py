"""A server for tests, in a thread of this process, over an engine that a test may slow down or keep from ending."""

import contextlib
import socket
import threading
import time

import openai
import uvicorn
from directories import chat_model

from asyncspec.actors.engines import make_engine
from asyncspec.commands.serve import configuration
from asyncspec.config import resolve_path
from asyncspec.models import tokenizer as tokenizers
from asyncspec.models.chat import ChatTemplate
from asyncspec.serve.app import Server
from asyncspec.serve.asks import Limits, Model
from asyncspec.serve.worker import Worker
from asyncspec.speculation.verify import Sampling

NAME = "sums"
TEMPLATE = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}{% if hint is defined %}0{% endif %}"
DRAFTED = ["speculation.method=eagle3", "speculation.draft_path=asset:tiny/eagle3", "speculation.draft_length=3"]


def policy(folder):
    """Return a directory with the shipped policy, and a chat template."""
    return chat_model(folder / "policy", TEMPLATE)


def configured(directory, *overrides):
    return configuration(str(directory), [*DRAFTED, "engine.slots=4", *overrides])


def model_of(config, **limits):
    limits = {"choices": 16, "waiting": 64, "timeout_s": 60.0} | limits
    path, settings = resolve_path(config.model.path), config.sampling
    return Model(
        NAME,
        tokenizers.load(path),
        ChatTemplate(path),
        {},
        64,
        Sampling(settings.temperature, settings.top_p, settings.top_k),
        Limits(config.engine.max_prompt_tokens, settings.max_response_tokens, **limits),
    )


class Running:
    """A server that answers, with its engine."""

    def __init__(self, config, key="", endless=False, step_s=0.0, **limits):
        """
        Args:
            endless: no token ends a response, so each has as many as were asked for.
            step_s: seconds that each engine step takes longer.
        """
        self.failures, self.lives = [], []  # and how many samples were live after each step

        def make():
            self.engine = engine = make_engine(config, "cpu")
            poll = engine.poll

            def slower():
                found = poll()
                self.lives.append(engine.live)
                time.sleep(step_s)
                return found

            engine.poll = slower
            if endless:
                engine.rows.stops_V.zero_()
                engine.rows.eos_token_ids = ()
            return engine

        self.worker = Worker(make, self.failures.append)
        self.worker.start()
        self.worker.wait_until_loaded()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.server = Server(model_of(config, **limits), self.worker, config.engine.slots, "127.0.0.1", key)
        self.http = uvicorn.Server(
            uvicorn.Config(self.server.app, lifespan="off", log_level="warning", timeout_graceful_shutdown=1)
        )
        self.thread = threading.Thread(target=self.http.run, args=([self.listener],), daemon=True)
        self.thread.start()

    def client(self, key="none", **options):
        return openai.OpenAI(
            base_url=f"http://127.0.0.1:{self.port}/v1", api_key=key, max_retries=0, timeout=60, **options
        )

    def empty(self):
        """Wait until no sample is left in the engine; return whether that was soon."""
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            if not (self.engine.live or self.engine.waiting or self.server._open or self.worker._tell):
                return True
            time.sleep(0.02)
        return False

    def close(self):
        self.http.should_exit = True
        self.thread.join(30)
        self.worker.stop()


@contextlib.contextmanager
def serving(config, **options):
    running = Running(config, **options)
    try:
        yield running
    finally:
        running.close()
