"""Packages that cannot be installed beside ours, in environments of their own: verifiers plays, OpenEnv answers."""

import asyncio
import json
import os
import shutil
import socket
import subprocess
import time
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from test_conversations import chat_policy, chatml  # noqa: F401  fixtures
from test_endpoint import play, stretches  # noqa: F401  a fixture
from test_environments import SAYS, answers, make

from asyncspec.environments.make import maker

HERE = Path(__file__).parent
VERIFIERS, OPENENV = (os.environ.get(f"ASYNCSPEC_{name}_PYTHON") for name in ("VERIFIERS", "OPENENV"))
pytestmark = pytest.mark.services


@pytest.mark.skipif(not VERIFIERS, reason="ASYNCSPEC_VERIFIERS_PYTHON is not set; make_environments.sh makes it")
def test_what_verifiers_records_is_what_is_trained(play, chatml, tmp_path):  # noqa: F811
    folder = tmp_path / "tokenizer"
    shutil.copytree(chatml.template.directory, folder)
    chatml.tokenizer.save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    command = [VERIFIERS, str(HERE / "verifiers_service.py")]
    ended, _ = play(
        how="process", command=command, after=[str(folder)], out=str(tmp_path / "record"), home=str(tmp_path), samples=1
    )
    assert ended.failed == [False], play.environments.first_failure
    recorded = json.loads((tmp_path / "record").read_text())["turns"]
    (completion,) = ended.completions
    trained = stretches(completion)
    assert [(turn["completion_ids"], turn["completion_logprobs"]) for turn in recorded] == [
        (tokens, pytest.approx(logprobs)) for tokens, logprobs, _ in trained
    ]
    whole = [*ended.ticket.prompt_tokens, *completion.tokens.tolist()]
    assert [*recorded[-1]["prompt_ids"], *recorded[-1]["completion_ids"]] == whole


@contextmanager
def counting():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = subprocess.Popen([OPENENV, str(HERE / "openenv_server.py"), str(port)])
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                assert time.monotonic() < deadline and server.poll() is None
                time.sleep(0.1)
        yield f"openenv:http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(20)


@pytest.mark.skipif(not OPENENV, reason="ASYNCSPEC_OPENENV_PYTHON is not set; make_environments.sh makes it")
def test_openenv_s_environments():
    with counting() as name:

        async def played():
            environment = maker(name)()
            begun = await environment.reset({"prompt": "", "reset": {"start": 40}})
            steps = [
                await environment.step({"role": "assistant", "content": text}) for text in ("a", '{"message": "bcd"}')
            ]
            steps.append(await environment.step({"role": "assistant", "content": ""}))
            await environment.close()
            return begun, steps

        begun, steps = asyncio.run(played())
        assert begun == [{"role": "user", "content": "count from 40"}]
        assert steps == [
            ([{"role": "user", "content": "41"}], False, 0.0),
            ([{"role": "user", "content": "44"}], False, 0.0),
            ([], True, 44.0),
        ]
        with closing(make(name)) as environments:  # several sessions at once, in a process of ours
            for key in range(6):
                environments.begin(key, {"prompt": "", "reset": {"start": key}})
            found = answers(environments, 6)
            assert [found[key].messages[0]["content"] for key in range(6)] == [f"count from {key}" for key in range(6)]
            for key in range(6):
                environments.step(key, SAYS)
            found = answers(environments, 6)
            assert [found[key].messages[0]["content"] for key in range(6)] == [str(key + 5) for key in range(6)]
