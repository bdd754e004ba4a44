"""Play one episode of three turns with the package `verifiers`, and print what it recorded as a line of JSON.

    verifiers_service.py BASE_URL API_KEY MODEL TOKENIZER_DIRECTORY

BASE_URL ends in /v1. verifiers' TrainClient renders the messages with the chat template of TOKENIZER_DIRECTORY and
sends tokens to {root}/inference/v1/generate. It is asked by a program that runs as a process on this host and sees no
more than an OpenAI-compatible server. Nothing is installed or downloaded; HOME/.cache/verifiers is written:

    program  --messages-->  verifiers  --tokens------------>  the server
             <--message---             <--tokens, logprobs--

The line has the reward of the episode and, for each turn, what verifiers would train on:

    {"reward": 0.3333, "turns": [{"prompt_ids": [...], "completion_ids": [...], "completion_logprobs": [...]}, ...]}
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import verifiers.v1 as vf

KEY_VARIABLE = "SERVICE_API_KEY"  # verifiers reads the key here, and keeps it from the program
QUESTIONS = ("8+7+5=", "3+4=", "9+1+2=")
ANSWERS = ("20", "7", "12")
PROGRAM = """
import sys
from openai import OpenAI

client, messages = OpenAI(), []
for question in sys.argv[2:]:
    messages.append({"role": "user", "content": question})
    answer = client.chat.completions.create(model=sys.argv[1], messages=messages)
    messages.append({"role": "assistant", "content": answer.choices[0].message.content or ""})
"""


class SumsData(vf.TaskData):
    questions: tuple[str, ...] = ()
    answers: tuple[str, ...] = ()


class Sums(vf.Task[SumsData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        """Return the share of questions with the right number after the last "#"."""
        said = [(message.content or "").rpartition("#")[2] for message in trace.assistant_messages]
        return sum(map(str.__eq__, said, self.data.answers)) / len(self.data.answers)


class SumsTaskset(vf.Taskset[Sums, vf.TasksetConfig]):
    def load(self) -> Iterator[Sums]:
        yield Sums(SumsData(prompt=QUESTIONS[0], questions=QUESTIONS, answers=ANSWERS), self.config.task)


class Asking(vf.Harness[vf.HarnessConfig]):
    """Runs `PROGRAM`, which asks the questions one after the other in one conversation."""

    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: SumsData,
    ) -> vf.ProgramResult:
        argv = [sys.executable, "-c", PROGRAM, ctx.model, *data.questions]
        return await runtime.run_program(argv, {"OPENAI_BASE_URL": endpoint, "OPENAI_API_KEY": secret})


__all__ = ["Asking", "SumsTaskset"]  # verifiers imports this file as a module and looks for them by their kinds


def turns(trace: vf.Trace) -> list[dict[str, Any]]:
    """Return the tokens of each message that the model sampled, with all tokens before them."""
    found = []
    for node in filter(lambda node: node.sampled, trace.nodes):
        first = node.mask.index(True)  # tokens of the template may stand before
        prompt, before = node.token_ids[:first], node.parent
        while before is not None:
            prompt, before = trace.nodes[before].token_ids + prompt, trace.nodes[before].parent
        completion = {"completion_ids": node.token_ids[first:], "completion_logprobs": node.logprobs}
        found.append({"prompt_ids": prompt, **completion})
    return found


async def play(base_url: str, model: str, tokenizer: str) -> vf.Episode:
    here = Path(__file__).stem
    agent = vf.AgentConfig(harness={"id": here}, runtime=vf.SubprocessConfig())
    env = vf.SingleAgentEnv(vf.SingleAgentEnvConfig(taskset={"id": here}, agent=agent))
    client = vf.TrainClientConfig(base_url=base_url, api_key_var=KEY_VARIABLE, renderer_model_name=tokenizer)
    async with env.serving():
        context = vf.ModelContext(model, client, vf.Sampling(max_tokens=40))
        return await env.run_episode(next(iter(env.taskset)), context)


def main() -> int:
    base_url, os.environ[KEY_VARIABLE], model, tokenizer = sys.argv[1:]
    episode = asyncio.run(play(base_url, model, tokenizer))
    if not episode.ok:
        for error in [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]:
            print(f"{error.type}: {error.message}", file=sys.stderr)
        return 1
    trace = episode.traces[0]
    print(json.dumps({"reward": trace.reward, "turns": turns(trace)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
