"""OpenEnv's environments, over the protocol of their servers: JSON on a WebSocket, a session for each episode.

The policy's text is the action if it is a JSON object, else {"message": text}. What it reads next is the observation's
"message", or else the whole observation as JSON. `environment.name=openenv:http://HOST:PORT` names the server.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from websockets.asyncio.client import ClientConnection, connect

from asyncspec.environments.protocol import Message, Stepped


class OpenEnv:
    def __init__(self, url: str) -> None:
        self.url, self.tool = f"ws{url.removeprefix('http').rstrip('/')}/ws", "openenv"
        self._socket: ClientConnection | None = None

    async def reset(self, row: Mapping[str, Any]) -> list[Message] | None:
        self._socket = await connect(self.url, open_timeout=None)
        given = row.get("reset", {})  # the server's own options, a column of the data
        observation = (await self._ask("reset", given))["observation"]
        return _read(observation) if observation else None

    async def step(self, message: Message) -> Stepped:
        found = await self._ask("step", _action(message["content"]))
        done = bool(found.get("done"))
        return [] if done else _read(found["observation"]), done, found.get("reward")

    async def _ask(self, what: str, data: Mapping[str, Any]) -> dict[str, Any]:
        await self._socket.send(json.dumps({"type": what, "data": data}))
        found = json.loads(await self._socket.recv())
        if found.get("type") == "error":
            raise RuntimeError(f"{self.url}: {found.get('data')}")
        return found["data"]

    async def close(self) -> None:
        if self._socket is not None:
            await self._socket.close()


def _read(observation: Mapping[str, Any]) -> list[Message]:
    said = observation.get("message")
    return [{"role": "user", "content": said if isinstance(said, str) else json.dumps(observation)}]


def _action(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"message": text}
