"""TRL's environments (its `environment_factory`): each public method is a tool, `reset(**columns)` begins an episode.

The policy calls a tool in the form that most open models were trained on, and gets the result in a message of the role
"tool". An answer without a call ends the episode. Its reward is the environment's `get_reward()`, if it has one.

    <tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import typing
from collections.abc import Callable, Mapping
from typing import Any

from asyncspec.environments.protocol import Message, Stepped

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_ARGUMENT = re.compile(r"^\s*(\w+)\s*(?:\([^)]*\))?\s*:\s*(.+)$", re.MULTILINE)
_OWN = {"reset", "close", "get_reward"}  # public methods that are no tools
_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}


class ToolsByMethod:
    def __init__(self, made: Any) -> None:
        self.made, self.tool = made, ""
        names = [name for name in dir(type(made)) if not name.startswith("_") and name not in _OWN]
        self._tools = {name: getattr(made, name) for name in names if callable(getattr(made, name))}
        self.tools = [schema(name, tool) for name, tool in self._tools.items()]

    async def reset(self, row: Mapping[str, Any]) -> list[Message] | None:
        said = await _result(self.made.reset(**row))
        prompt = row["prompt"]
        messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
        if not said:
            return messages
        last = messages[-1]
        return [*messages[:-1], {**last, "content": f"{last['content']}{said}"}]

    async def step(self, message: Message) -> Stepped:
        self.tool = ""
        calls = _CALL.findall(message["content"])
        if not calls:
            reward = getattr(self.made, "get_reward", None)
            return [], True, None if reward is None else float(await _result(reward()))
        said = [{"role": "tool", "content": str(await self._call(call))} for call in calls]
        return said, False, None

    async def _call(self, text: str) -> Any:
        """Return what a tool returns, or what the policy reads about a call that failed."""
        try:
            call = json.loads(text)
            tool, self.tool = self._tools[call["name"]], call["name"]
            arguments = call.get("arguments", {})
            if inspect.iscoroutinefunction(tool):
                return await tool(**arguments)
            return await asyncio.to_thread(tool, **arguments)
        except Exception as error:  # of the call, or of the tool: the policy reads it, and may do better
            return f"error: {type(error).__name__}: {error}"

    async def close(self) -> None:
        if callable(close := getattr(self.made, "close", None)):
            await _result(close())


async def _result(value: Any) -> Any:
    return await value if asyncio.iscoroutine(value) else value


def schema(name: str, tool: Callable[..., Any]) -> dict[str, Any]:
    """Return the JSON schema of a tool, from its annotations and the `Args:` of its docstring."""
    text = inspect.getdoc(tool) or ""
    about, _, arguments = text.partition("Args:")
    said = dict(_ARGUMENT.findall(arguments.partition("Returns:")[0]))
    hints, properties, required = typing.get_type_hints(tool), {}, []
    for each in inspect.signature(tool).parameters.values():
        kind = typing.get_origin(hints.get(each.name)) or hints.get(each.name)
        properties[each.name] = {"type": _TYPES.get(kind, "string"), "description": said.get(each.name, "")}
        required += [each.name] if each.default is each.empty else []
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "description": about.strip(), "parameters": parameters}}
