"""The server's addresses, and who may use them.

    POST /v1/chat/completions  POST /v1/completions   GET /v1/models   GET /health
    POST /inference/v1/generate      tokens in, tokens out, in vLLM's form

A server with a key answers whoever shows the key. A server without one answers only requests whose Host header names
this host. A web page that somebody reads on this host sends its own name there, so it cannot use the server, even if
that name leads to the loopback interface. A form cannot either, because a request must be JSON.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from asyncspec.serve import answers
from asyncspec.serve.asks import Ask, Model, Refused, understand, understand_tokens
from asyncspec.serve.calls import Call
from asyncspec.serve.worker import Worker

STOP_S = 3  # that requests in progress have at the end
BODY_S = 30.0  # that the body of a request may take to arrive
HERE = ("localhost", "127.0.0.1", "::1")
_GONE = 499  # the status, which nobody reads, of a request whose client has gone


class Server:
    def __init__(self, model: Model, worker: Worker, slots: int, host: str, key: str) -> None:
        """
        Args:
            worker: has loaded the engine.
            slots: of the engine.
            host: the address that the server listens on.
            key: what clients must show; "": nothing.
        """
        self.model, self._worker, self._key = model, worker, key.encode()
        self._room = slots + model.limits.waiting  # samples that may be in the engine
        self._open = 0  # those that are
        self._names, self._began = {*HERE, host}, int(time.time())
        routes = [
            Route("/health", self._health, methods=["GET"]),
            Route("/v1/models", self._guarded(self._models), methods=["GET"]),
            Route("/v1/models/{name:path}", self._guarded(self._one_model), methods=["GET"]),
            Route("/v1/chat/completions", self._guarded(self._chat), methods=["POST"]),
            Route("/v1/completions", self._guarded(self._completion), methods=["POST"]),
            Route("/inference/v1/generate", self._guarded(self._tokens), methods=["POST"]),
        ]
        self.app = Starlette(routes=routes, exception_handlers={HTTPException: _other})

    def _guarded(self, handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        """Return a handler that answers only who may ask, and turns a `Refused` into the answer."""

        async def guarded(request: Request) -> Response:
            try:
                self._authorize(request)
                return await handler(request)
            except Refused as refused:
                return answers.refusal(refused)
            except ClientDisconnect:
                return Response(status_code=_GONE)

        return guarded

    def _authorize(self, request: Request) -> None:
        if not self._key:
            if _named(request.headers.get("host", "")) not in self._names:
                raise Refused("Host: expected the name of this host, since the server has no key", status=403)
            return
        scheme, _, shown = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(shown.strip().encode("utf-8", "replace"), self._key):
            raise Refused("Authorization: expected Bearer and the server's key", status=401, code="invalid_api_key")

    async def _health(self, request: Request) -> Response:
        return answers.answer({"status": "ok"})

    async def _models(self, request: Request) -> Response:
        return answers.answer(answers.models(self.model, self._began))

    async def _one_model(self, request: Request) -> Response:
        if (name := request.path_params["name"]) != self.model.name:
            raise Refused(f"model={ascii(name)[:200]}: expected {self.model.name!r}", "model", 404, "model_not_found")
        return answers.answer(answers.models(self.model, self._began)["data"][0])

    async def _chat(self, request: Request) -> Response:
        return await self._generate(request, lambda body: understand(body, self.model, True))

    async def _completion(self, request: Request) -> Response:
        return await self._generate(request, lambda body: understand(body, self.model, False))

    async def _tokens(self, request: Request) -> Response:
        return await self._generate(
            request, lambda body: understand_tokens(body, self.model), lambda writer: writer.tokens()
        )

    def _worker_of(self, request: Request, body: object) -> Worker:
        """Return who samples for a request."""
        return self._worker

    async def _generate(
        self,
        request: Request,
        understood: Callable[[object], Ask],
        written: Callable[[answers.Writer], dict] = answers.Writer.whole,
    ) -> Response:
        body = await _body(request, self.model.limits.body_bytes)
        ask = await run_in_threadpool(understood, body)
        worker = self._worker_of(request, body)
        if self._open + ask.choices > self._room:
            raise Refused(
                f"{self._open} samples are generated or wait; expected at most {self._room}; try again later",
                status=429,
                code="too_many_requests",
            )
        self._open += ask.choices  # of a stream, too, which begins only when the response does
        if ask.stream:
            return _Stream(self._streamed(ask, worker), lambda: self._leave(ask))
        try:
            return await self._unless_gone(request, self._whole(ask, worker, written))
        finally:
            self._leave(ask)

    def _leave(self, ask: Ask) -> None:
        self._open -= ask.choices

    async def _unless_gone(self, request: Request, work: Awaitable[Response]) -> Response:
        """Return the work's result. If the client disconnects meanwhile, the work is cancelled."""

        async def gone() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass

        working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone())
        try:
            await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                return Response(status_code=_GONE)
            return working.result()
        finally:
            for task in (working, leaving):
                task.cancel()
            await asyncio.gather(working, leaving, return_exceptions=True)

    async def _whole(self, ask: Ask, worker: Worker, written: Callable[[answers.Writer], dict]) -> Response:
        with Call(ask, self.model, worker) as call:
            try:
                async with asyncio.timeout(self.model.limits.timeout_s):
                    async for _ in call.run():
                        pass
            except TimeoutError:
                raise self._late() from None
            return answers.answer(written(answers.Writer(call, self.model)))

    async def _streamed(self, ask: Ask, worker: Worker) -> AsyncIterator[str]:
        """Yield server-sent events."""

        def event(content) -> str:
            return f"data: {answers.dump(content)}\n\n"

        with Call(ask, self.model, worker) as call:
            writer, limit = answers.Writer(call, self.model), self.model.limits.timeout_s
            for chunk in writer.began():
                yield event(chunk)
            try:
                async with asyncio.timeout(limit):
                    async for index, text, before in call.run():
                        for chunk in writer.grew(index, text, before):
                            yield event(chunk)
            except TimeoutError:
                yield event(answers.error(self._late()))
                return
            except Refused as refused:
                yield event(answers.error(refused))
                return
            for chunk in writer.ended():
                yield event(chunk)
            yield "data: [DONE]\n\n"

    def _late(self) -> Refused:
        limit = self.model.limits.timeout_s
        return Refused(f"not finished within {limit:g} s (--timeout of the server)", status=504, code="timeout")


def http_server(app: Starlette, **more: Any) -> uvicorn.Server:
    """Return an HTTP server for an app.

    Args:
        more: further settings of uvicorn.
    """
    settings = {"http": "h11", "ws": "none", "lifespan": "off", "loop": "asyncio", "log_level": "warning"}
    quiet = {"access_log": False, "server_header": False, "timeout_graceful_shutdown": STOP_S}
    return uvicorn.Server(uvicorn.Config(app, **settings, **quiet, **more))


class _Stream(StreamingResponse):
    """A stream of events, which is closed whatever happens, and then tells."""

    def __init__(self, events: AsyncIterator[str], closed: Callable[[], None]) -> None:
        super().__init__(events, headers={"Cache-Control": "no-store"}, media_type="text/event-stream")
        self._events, self._closed = events, closed

    async def __call__(self, scope, receive, send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._events.aclose()
            self._closed()


async def _body(request: Request, most: int) -> object:
    """Read and parse a body of at most `most` bytes."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise Refused("Content-Type: expected application/json", status=415)
    size, parts = 0, []
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                size += len(part)
                if size > most:
                    raise Refused(f"the body: expected at most {most} bytes", status=413)
                parts.append(part)
    except TimeoutError:
        raise Refused(f"the body: not here within {BODY_S:g} s", status=408) from None
    try:
        return await run_in_threadpool(json.loads, b"".join(parts))
    except (ValueError, RecursionError) as error:
        raise Refused(f"the body: {ascii(str(error))[1:100]}; expected JSON") from None


def _named(host: str) -> str | None:
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None


async def _other(request: Request, error: Exception) -> Response:
    """Answer to an address or a method that the server has not."""
    assert isinstance(error, HTTPException)
    path = ascii(request.url.path)[1:-1][:100]
    return answers.refusal(Refused(f"{request.method} {path}: {error.detail}", status=error.status_code))
