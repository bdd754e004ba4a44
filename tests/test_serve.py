"""`asyncspec serve`, asked by OpenAI's own client."""

import http.client
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import openai
import pytest
from serving import DRAFTED, NAME, configured, policy, serving
from test_export_command import learned

from asyncspec import cli
from asyncspec.actors.engines import make_engine
from asyncspec.commands import serve
from asyncspec.config import resolve_path
from asyncspec.engine.protocol import Request
from asyncspec.models import tokenizer as tokenizers
from asyncspec.speculation.verify import GREEDY, Sampling

PROMPT = "12+34="
USER = [{"role": "user", "content": PROMPT}]
SHORT = ["engine.max_prompt_tokens=24", "sampling.max_response_tokens=200"]


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return configured(policy(tmp_path_factory.mktemp("policy")), *SHORT)


@pytest.fixture(scope="module")
def server(config):
    with serving(config) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    return server.client()


@pytest.fixture
def endless(config):
    """A server of responses that take some seconds, each as long as it may be."""
    with serving(config, endless=True, step_s=0.02, waiting=2, timeout_s=30.0) as running:
        yield running


def answers(config, seeds, sampling=None, most=64):
    """Return (text, logprobs, completion) of samples, from an engine of their own."""
    engine = make_engine(config, "cpu")
    tokenizer = tokenizers.load(resolve_path(config.model.path))
    engine.submit(Request(0, tokenizers.encode_prompt(tokenizer, PROMPT), seeds, most, sampling))
    done = []
    while engine.live or engine.waiting:
        done += engine.poll()
    done.sort(key=lambda each: each.sample)
    return [(tokenizers.response_text(tokenizer, each.tokens.tolist(), each.truncated, False), each) for each in done]


def test_an_answer_is_the_engines_for_the_same_seed(config, client):
    expected = answers(config, [5, 6, 7])
    found = client.completions.create(model=NAME, prompt=PROMPT, n=3, seed=5, max_tokens=64, logprobs=0)
    assert [choice.text for choice in found.choices] == [text for text, _ in expected]
    assert [choice.finish_reason for choice in found.choices] == ["stop"] * 3
    for choice, (text, completion) in zip(found.choices, expected):
        assert "".join(choice.logprobs.tokens) == text
        assert choice.logprobs.token_logprobs == pytest.approx(completion.logprobs[:-1].tolist(), abs=1e-5)
        assert choice.logprobs.text_offset == [*range(len(text))]
    used = found.usage
    assert used.completion_tokens == sum(len(each.tokens) for _, each in expected)
    assert used.prompt_tokens == len(PROMPT) and used.total_tokens == used.prompt_tokens + used.completion_tokens
    details = used.completion_tokens_details  # it has speculated
    assert details.accepted_prediction_tokens == sum(each.accepted for _, each in expected) > 0
    assert details.rejected_prediction_tokens == sum(each.proposed - each.accepted for _, each in expected)
    said = client.chat.completions.create(model=NAME, messages=USER, n=3, seed=5, max_completion_tokens=64)
    assert [choice.message.content for choice in said.choices] == [text for text, _ in expected]
    assert said.choices[0].message.role == "assistant" and said.usage.model_dump() == used.model_dump()


def test_a_stream_has_the_same_text_in_pieces(client):
    options = {"n": 2, "seed": 9, "max_tokens": 64, "temperature": 1.3}
    whole = client.chat.completions.create(model=NAME, messages=USER, logprobs=True, **options)
    usage = {"include_usage": True}
    chunks = list(
        client.chat.completions.create(
            model=NAME, messages=USER, stream=True, stream_options=usage, logprobs=True, **options
        )
    )
    assert [chunk.choices[0].delta.role for chunk in chunks[:2]] == ["assistant"] * 2
    *parts, last = chunks
    assert last.choices == [] and last.usage == whole.usage and all(chunk.usage is None for chunk in parts)
    for index, expected in enumerate(whole.choices):
        mine = [chunk.choices[0] for chunk in parts if chunk.choices[0].index == index]
        assert "".join(choice.delta.content or "" for choice in mine) == expected.message.content
        assert [choice.finish_reason for choice in mine] == [None] * (len(mine) - 1) + [expected.finish_reason]
        tokens = [token for choice in mine if choice.logprobs for token in choice.logprobs.content]
        assert tokens == expected.logprobs.content and len(tokens) == len(expected.message.content)
    chunks = list(client.completions.create(model=NAME, prompt=PROMPT, stream=True, **options))
    assert all(chunk.usage is None for chunk in chunks)
    texts = ["".join(chunk.choices[0].text for chunk in chunks if chunk.choices[0].index == i) for i in range(2)]
    assert texts == [choice.message.content for choice in whole.choices]


@pytest.mark.parametrize(
    "asked, sampling",
    [
        ({"temperature": 0}, GREEDY),
        ({"temperature": 0.5, "top_p": 0.9}, Sampling(0.5, 0.9, 0)),
        ({"extra_body": {"top_k": 2}}, Sampling(1.0, 1.0, 2)),
    ],
)
def test_each_request_has_its_own_sampling(config, client, asked, sampling):
    found = client.completions.create(model=NAME, prompt=PROMPT, n=4, seed=1, max_tokens=64, **asked)
    assert [choice.text for choice in found.choices] == [text for text, _ in answers(config, [1, 2, 3, 4], sampling)]


def test_a_response_ends_at_a_stop_string_or_at_its_limit(client):
    def ask(**options):
        return client.completions.create(model=NAME, prompt=PROMPT, temperature=0, **options)

    whole = ask().choices[0].text
    assert len(whole) >= 2
    for stream in False, True:
        found = ask(stop=[whole[1], "never"], stream=stream)
        text = "".join(chunk.choices[0].text for chunk in found) if stream else found.choices[0].text
        assert text == whole[:1]
    found = ask(stop=whole[1])
    assert found.choices[0].finish_reason == "stop" and found.usage.completion_tokens == 2
    found = ask(max_tokens=1)
    assert (found.choices[0].text, found.choices[0].finish_reason) == (whole[:1], "length")


def test_models_and_health(server, client):
    [card] = client.models.list().data
    assert card.id == NAME and client.models.retrieve(NAME).id == NAME
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    assert httpx.get(f"http://127.0.0.1:{server.port}/health").json() == {"status": "ok"}


def test_errors_have_openais_form(server, client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=NAME, messages=USER, presence_penalty=1)
    assert caught.value.body["message"] == "presence_penalty=1: not supported; expected 0, or nothing"
    assert (caught.value.param, caught.value.type) == ("presence_penalty", "invalid_request_error")
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt", messages=USER)
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=NAME, prompt="1" * 100)
    assert caught.value.code == "context_length_exceeded"
    assert server.empty()


def test_requests_that_are_no_json_or_too_large_are_refused(server):
    address, json_type = f"http://127.0.0.1:{server.port}/v1/completions", {"Content-Type": "application/json"}
    cases = [
        (dict(content=b"{", headers=json_type), 400, "expected JSON"),
        (dict(content=b"[" * 100_000, headers=json_type), 400, "expected JSON"),
        (dict(content=b"{}", headers={"Content-Type": "text/plain"}), 415, "expected application/json"),
        (dict(content=b" " * (5 << 20), headers=json_type), 413, "expected at most 4194304 bytes"),
        (dict(json={"model": NAME, "prompt": "1"}, headers={"Host": "evil.example"}), 403, "name of this host"),
    ]
    for request, status, said in cases:
        answer = httpx.post(address, **request)
        assert answer.status_code == status and said in answer.json()["error"]["message"]
    answer = httpx.get(address)
    assert answer.status_code == 405 and "GET /v1/completions: Method Not Allowed" in answer.text


def test_requests_share_the_engine(endless):
    """Two clients stream at once: their pieces alternate, and both are live in the same steps."""
    came = queue.Queue()

    def ask(name):
        for chunk in endless.client().completions.create(
            model=NAME, prompt=PROMPT, max_tokens=60, stream=True, temperature=1.5
        ):
            came.put((name, chunk.choices[0].finish_reason))

    threads = [threading.Thread(target=ask, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    order = [came.get_nowait() for _ in range(came.qsize())]
    names = "".join(name for name, _ in order)
    assert max(endless.lives) == 2 and names.count("ab") > 2 and names.count("ba") > 2
    assert [finish for _, finish in order if finish] == ["length", "length"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_slots(endless, stream):
    body = {"model": NAME, "prompt": PROMPT, "n": 3, "stream": stream}
    connection = http.client.HTTPConnection("127.0.0.1", endless.port)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    while not endless.engine.live:
        time.sleep(0.01)
    if stream:
        assert connection.getresponse().read(20).startswith(b"data: ")
    sock = connection.sock
    if sock is not None:
        sock.shutdown(socket.SHUT_RDWR)
    connection.close()
    steps = len(endless.lives)
    assert endless.empty() and len(endless.lives) - steps < 50  # of the 67 and more that are needed to the end


def test_a_stream_that_is_closed_early_frees_its_slot(endless):
    with endless.client() as client:
        stream = client.completions.create(model=NAME, prompt=PROMPT, stream=True)
        next(iter(stream))
        stream.close()
        assert endless.empty()


def test_too_many_requests_are_told_to_try_later(endless):
    client = endless.client()
    streams = [client.completions.create(model=NAME, prompt=PROMPT, n=3, stream=True) for _ in range(2)]
    with pytest.raises(openai.RateLimitError) as caught:  # 4 slots, and 2 may wait
        client.completions.create(model=NAME, prompt=PROMPT)
    assert caught.value.response.headers["Retry-After"] == "1"
    assert "6 samples are generated or wait; expected at most 6" in caught.value.body["message"]
    for stream in streams:
        stream.close()
    assert endless.empty()
    assert client.completions.create(model=NAME, prompt=PROMPT, max_tokens=3).choices[0].finish_reason == "length"


def test_a_request_that_takes_too_long_ends(config):
    with serving(config, endless=True, step_s=0.05, timeout_s=0.5) as running:
        with pytest.raises(openai.InternalServerError) as caught:
            running.client().completions.create(model=NAME, prompt=PROMPT)
        said = "not finished within 0.5 s (--timeout of the server)"
        assert caught.value.status_code == 504 and caught.value.body["message"] == said
        with pytest.raises(openai.APIError, match="not finished within 0.5 s"):
            list(running.client().completions.create(model=NAME, prompt=PROMPT, stream=True))
        assert running.empty()


def test_a_key_is_needed_where_there_is_one(config):
    with serving(config, key="k" * 16) as running:
        address = f"http://127.0.0.1:{running.port}"
        for key in "none", "k" * 15, "k" * 17:
            with pytest.raises(openai.AuthenticationError) as caught:
                running.client(key).models.list()
            assert caught.value.code == "invalid_api_key"
        for header in "ä" * 16, "Basic " + "k" * 16, "k" * 16, "Bearer":
            shown = {"Authorization": header.encode()}
            assert httpx.get(f"{address}/v1/models", headers=shown).status_code == 401
        for method, path in ("GET", "/v1/models"), ("POST", "/v1/completions"), ("POST", "/v1/chat/completions"):
            assert httpx.request(method, address + path).status_code == 401
        assert httpx.get(f"{address}/health").status_code == 200
        good = running.client("k" * 16, default_headers={"Host": "models.example"})
        assert good.completions.create(model=NAME, prompt=PROMPT, max_tokens=1).choices[0].finish_reason == "length"


def test_an_engine_that_fails_is_told_to_all_who_wait(config):
    with serving(config, endless=True, step_s=0.02) as running:

        def ask():
            try:
                running.client().completions.create(model=NAME, prompt=PROMPT)
            except openai.APIStatusError as error:
                told.append((error.status_code, error.body["message"]))

        told = []
        threads = [threading.Thread(target=ask) for _ in range(2)]
        for thread in threads:
            thread.start()
        while running.engine.live < 2:
            time.sleep(0.01)
        running.engine.advance = lambda B, K: 1 // 0
        for thread in threads:
            thread.join(30)
        assert told == [(500, "the engine has failed: integer division or modulo by zero")] * 2
        assert isinstance(running.failures[0], ZeroDivisionError)


def test_each_mistake_is_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv(serve.KEY, raising=False)
    (tmp_path / "short").write_text("secret\n")
    (tmp_path / "spaced").write_text("a key with many words")
    (tmp_path / "run").mkdir()
    learned(tmp_path / "run", [])
    for file in (tmp_path / "run" / "checkpoint" / "policy").iterdir():
        file.unlink()
    tiny, run = "asset:tiny/policy", str(tmp_path / "run")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        cases = {
            (tiny, "--host", "0.0.0.0"): "--host 0.0.0.0: others reach it, so it needs a key; expected --key-file FILE",
            (tiny, "--key-file", "none"): "--key-file none: No such file or directory; expected a file",
            (tiny, "--key-file", f"{tmp_path}/short"): "expected a key of at least 16 characters in ASCII",
            (tiny, "--key-file", f"{tmp_path}/spaced"): "expected a key of at least 16 characters in ASCII",
            (tiny, "--port", str(port)): f"--port {port}: Address already in use; expected an address of this host",
            (
                tiny,
                "--port",
                "0",
                "engine.kind=vllm",
                "speculation.draft_length=3",
            ): "expected the embedded engine; vLLM and SGLang have servers",
            (tiny, "--port", "0", "engine.slots=0"): "engine.slots=0: expected at least 1",
            ("none", "--port", "0"): "model.path='none': expected a Hugging Face directory, with config.json in it",
            (run, "--port", "0"): "the run has no checkpoint/policy yet; expected one that has ended",
        }
        for arguments, expected in cases.items():
            assert cli.main(["serve", *arguments]) == 2
            said = capsys.readouterr().err
            assert expected in said and said.count("\n") == 1, said
    with pytest.raises(SystemExit):
        cli.main(["serve", tiny, "--timeout", "0"])
    assert "--timeout 0.0: expected a number from 0.1 to 1e+06" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert cli.main(["serve", tiny]) == 2
    assert "uvicorn is not installed; expected pip install 'asyncspec[serve]'" in capsys.readouterr().err


def test_a_run_is_served_as_it_was_trained(tmp_path):
    learned(tmp_path / "run", [], "speculation.method=eagle3", "sampling.temperature=0.8", "engine.slots=5", *SHORT)
    found = serve.configuration(str(tmp_path / "run"), ["engine.slots=3"])
    assert found.model.path == f"{tmp_path}/run/checkpoint/policy" and found.draft_directory == "asset:tiny/eagle3"
    assert (found.sampling.temperature, found.engine.slots, found.engine.max_prompt_tokens) == (0.8, 3, 24)
    (tmp_path / "run" / "checkpoint" / "draft").symlink_to(resolve_path("asset:tiny/eagle3"))
    assert serve.configuration(str(tmp_path / "run"), []).draft_directory == f"{tmp_path}/run/checkpoint/draft"
    learned(tmp_path / "mtp", [], "speculation.method=mtp")
    found = serve.configuration(str(tmp_path / "mtp"), [])
    assert found.draft_directory == f"{tmp_path}/mtp/checkpoint/policy" and found.speculation.method == "mtp"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_serves_until_an_interrupt(tmp_path, number):
    learned(tmp_path / "sums", [], *DRAFTED, *SHORT)
    (tmp_path / "key").write_text("a-key-of-16-characters\n")
    command = [sys.executable, "-m", "asyncspec", "serve", "sums", "--port", "0", "--key-file", "key"]
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=os.environ
    )
    try:
        ready, curl = child.stdout.readline(), child.stdout.readline()
        assert (
            ready.startswith("serving sums at http://127.0.0.1:")
            and "draft eagle3 from asset:tiny/eagle3, k=3" in ready
        )
        assert ready.endswith("responses of up to 200, 300 s a request; a key\n")
        address = ready.split()[3].removesuffix(":")
        client = openai.OpenAI(base_url=address, api_key="a-key-of-16-characters", max_retries=0)
        assert client.completions.create(model="sums", prompt=PROMPT, temperature=0).choices[0].text
        shown = subprocess.run(
            curl.strip(),
            shell=True,
            capture_output=True,
            text=True,
            env=os.environ | {serve.KEY: "a-key-of-16-characters"},
        )
        assert json.loads(shown.stdout)["choices"][0]["finish_reason"] in ("stop", "length"), shown.stderr
        stream = client.completions.create(model="sums", prompt=PROMPT, stream=True, n=8)
        next(iter(stream))
        began = time.monotonic()
        child.send_signal(number)
        assert child.wait(30) == 130 and time.monotonic() - began < 15
        assert child.stderr.read() == "asyncspec serve: interrupted\n" and child.stdout.read() == ""
    finally:
        child.kill()
