"""Environments for tests, which behave as their row says; and chat templates."""

import asyncio
import contextlib
import json
import os
import time

CHATML = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_start|>system\nhelp<|im_end|>\n{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Leaves out the reasoning of answers before the last message of a user, and wraps results in a turn of the user.
FORGETFUL = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}{% set said = m.content %}"
    "{% if '</think>' in said and loop.index0 < ns.last %}{% set said = said.split('</think>')[-1].lstrip('\n') %}"
    "{% endif %}<|im_start|>assistant\n{{ said }}<|im_end|>\n{% elif m.role == 'tool' %}<|im_start|>user\n"
    "<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Counts the messages at the very beginning.
COUNTING = "{{ messages | length }} messages\n" + CHATML


class Scripted:
    """Answers as the row says: `script` has an item for each turn."""

    tool = ""

    def __init__(self):
        self.at = 0

    def reset(self, row):
        self.script = list(row.get("script", []))
        _do(row.get("at_reset", ""))
        return row.get("messages")

    async def step(self, message):
        what = self.script[self.at] if self.at < len(self.script) else "end"
        self.at, self.tool = self.at + 1, "slow" if what.startswith("sleep") else ""
        if what.startswith("sleep"):
            await asyncio.sleep(float(what.removeprefix("sleep ")))
        else:
            _do(what)
        if what == "end":
            return [], True, 1.0
        if what == "nonsense":
            return "what"
        return [{"role": "user", "content": f"{what} {len(message['content'])}"}], False, 0.25

    async def close(self):
        pass


class Plain:
    """The same with plain functions, which run in threads."""

    def __init__(self):
        self.made = Scripted()

    def reset(self, row):
        return self.made.reset(row)

    def step(self, message):
        return asyncio.run(self.made.step(message))

    def close(self):
        pass


class Adder:
    """An environment with tools by method."""

    def reset(self, answer="", **columns):
        self.answer, self.said, self.calls = answer, None, 0
        return " Use the tools."

    def add(self, left: int, right: int = 1) -> int:
        """Add two numbers.

        Args:
            left: the first one.
            right (int): the second one.

        Returns:
            their sum
        """
        self.calls += 1
        return left + right

    async def remember(self, what: str) -> str:
        """Keep a text."""
        self.said = what
        return "ok"

    def get_reward(self):
        return float(self.said == self.answer)

    def _hidden(self):
        raise AssertionError


def _do(what):
    if what == "raise":
        raise RuntimeError("no tool here")
    if what == "die":
        os._exit(7)
    if what == "hang":
        time.sleep(3600)
    if what == "spin":
        while True:
            pass


class Talker:
    """Asks the policy by itself, in the way that the row says."""

    async def run(self, row, endpoint):
        import httpx
        import openai

        client = openai.AsyncOpenAI(**{name: endpoint[name] for name in ("base_url", "api_key")}, max_retries=0)
        how, said = row["how"], []
        if how == "nothing":
            return 1.0
        if how == "process":  # in an environment of its own
            told = [endpoint["base_url"], endpoint["api_key"], endpoint["model"], *row["after"]]
            process = await asyncio.create_subprocess_exec(
                *row["command"], *told, stdout=-1, env={**os.environ, "HOME": row["home"], "PYTHONPATH": ""}
            )
            printed, _ = await process.communicate()
            with open(row["out"], "wb") as out:
                out.write(printed)
            return json.loads(printed)["reward"]
        if how == "chat":
            messages = [{"role": "user", "content": "go"}]
            for turn in range(row["turns"]):
                found = await client.chat.completions.create(
                    model=endpoint["model"], messages=messages, max_tokens=12, stop=row.get("stop"), logprobs=True
                )
                text = found.choices[0].message.content
                said.append(text)
                messages += [{"role": "assistant", "content": text}, {"role": "tool", "content": f"turn {turn}"}]
        elif how == "text":
            prompt = "go"
            for turn in range(row["turns"]):
                found = await client.completions.create(model=endpoint["model"], prompt=prompt, max_tokens=12)
                said.append(found.choices[0].text)
                prompt += said[-1] + f" turn {turn}:"
        elif how == "stream":
            stream = await client.chat.completions.create(
                model=endpoint["model"], messages=[{"role": "user", "content": "go"}], max_tokens=12, stream=True
            )
            said.append("".join([part.choices[0].delta.content or "" async for part in stream if part.choices]))
        elif how == "raises":
            asking = client.completions.create(model=endpoint["model"], prompt=row["tokens"], max_tokens=100)
            await asyncio.wait([asyncio.ensure_future(asking)], timeout=0.02)
            raise RuntimeError("no time")
        else:
            tokens = list(row["tokens"])
            root = endpoint["base_url"].removesuffix("/v1")
            headers = {"Authorization": f"Bearer {endpoint['api_key']}"}
            params = {"max_tokens": 12, "logprobs": 1, "temperature": 1.0, "skip_special_tokens": False}
            async with httpx.AsyncClient(headers=headers, timeout=60) as http:

                async def generated(**options):
                    body = {"model": endpoint["model"], "token_ids": tokens, "sampling_params": params}
                    return await http.post(f"{root}/inference/v1/generate", json=body, **options)

                for turn in range(row["turns"]):
                    if how == "dropped":  # its client gives up, and asks again
                        with contextlib.suppress(httpx.TimeoutException):
                            await generated(timeout=0.004)
                        await asyncio.sleep(0.05)
                    answer = await generated()
                    if how == "again" and turn == 0:  # as if the answer had been lost
                        answer = await generated()
                    choice = answer.json()["choices"][0]
                    assert len(choice["token_ids"]) == len(choice["logprobs"]["content"])
                    tokens += choice["token_ids"] + [3, 1, 4]
                if how == "rewrites":
                    tokens[len(row["tokens"])] ^= 1
                    answer = await generated()
                    raise RuntimeError(answer.json()["error"]["message"])
        return len(said) / 10


class Divider:
    """Plain tools of which one fails, or takes its time."""

    def reset(self, **columns):
        pass

    def divide(self, left: int, right: int) -> float:
        time.sleep(0.3)
        return left / right
