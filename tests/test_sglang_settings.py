"""engine.kind=sglang: settings, and servers, that are refused in one line before a run. The server is a test double."""

import socket

import pytest
from mock_sglang import POLICY, SGLANG, URL, MockSglangServer, one_line

from asyncspec.actors.engines import make_engine
from asyncspec.config import ConfigError, load
from asyncspec.engine import sglang_server
from asyncspec.launch.preflight import check_inputs


@pytest.mark.parametrize(
    "info,override,expected",
    [
        ({"model_path": "/no/such"}, (), "serves '/no/such': /no/such/config.json: "),
        (
            {"model_path": str(POLICY.parent / "draft_model")},
            (),
            "which has n_layers=2; the policy of model.path has 24; expected a server started",
        ),
        (
            {"speculative_algorithm": "NGRAM"},
            (),
            "has speculative_algorithm=NGRAM; expected None; nearest valid choice: speculation.method=ngram",
        ),
        ({"speculative_algorithm": "EAGLE3"}, (), "expected None; nearest valid choice: a server started without it"),
        (
            {},
            ("speculation.method=ngram", "speculation.draft_length=1"),
            "expected NGRAM; nearest valid choice: speculation.method=none",
        ),
        (
            {"max_req_input_len": 155},
            (),
            "takes prompt and response of 159 tokens together; expected 160, those of engine.max_prompt_tokens and",
        ),
        ({"max_queued_requests": 4}, (), "max_queued_requests=4; expected engine.slots=64 or more"),
        ({"enable_hierarchical_cache": True}, (), "started with --enable-hierarchical-cache, with which it may refuse"),
        (
            {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 12},
            ("speculation.method=ngram", "speculation.draft_length=1"),
            "nearest valid choice: speculation.draft_length=11",
        ),
        (
            {
                "speculative_algorithm": "NGRAM",
                "speculative_num_draft_tokens": 2,
                "speculative_accept_threshold_acc": 0.5,
            },
            ("speculation.method=ngram", "speculation.draft_length=1"),
            "speculative_accept_threshold_acc=0.5, which changes the distribution of samples",
        ),
    ],
)
def test_a_server_with_other_settings_is_refused_before_the_run(info, override, expected):
    with MockSglangServer(info=info) as server:
        for begin in (check_inputs, lambda config: make_engine(config, "cpu")):
            with pytest.raises(ConfigError) as error:
                begin(load("tiny", [*SGLANG, f"engine.url={server.url}", *override]))
            one_line(error, expected)


@pytest.mark.parametrize("hang", [False, True])
def test_a_missing_server_gives_one_line_before_the_run(monkeypatch, hang):
    monkeypatch.setattr(sglang_server.Server.ask, "__defaults__", (None, None, 0.3))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        if not hang:
            listener.close()
        with pytest.raises(ConfigError) as error:
            check_inputs(load("tiny", [*SGLANG, f"engine.url={url}"]))
    one_line(
        error,
        f"SGLang at {url}/server_info: ",
        "no answer within 0.3 s" if hang else "Connection refused",
        "nearest valid choice: engine.kind=torch",
    )


@pytest.mark.parametrize(
    "overrides,expected",
    [
        (
            ("engine.url=",),
            f"engine.url='': expected the address of each generator's server with engine.kind=sglang; nearest valid "
            f"choice: engine.url={URL}",
        ),
        (("engine.url=localhost:30000",), "expected http://HOST:PORT"),
        (("engine.url=http://localhost",), "expected http://HOST:PORT"),
        (("engine.url=http://localhost:port",), "expected http://HOST:PORT"),
        (
            (f"engine.url={URL},{URL}", "deployment.generators=2"),
            f"expected a different server for each generator; nearest valid choice: engine.url={URL}",
        ),
        (
            (f"engine.url={URL},http://b:1",),
            "names 2 servers; expected 1, one for each generator; nearest valid choice: deployment.generators=2",
        ),
        (("speculation.method=eagle3",), "expected ngram or none with engine.kind=sglang"),
        (
            ("speculation.method=ngram", "speculation.draft_length=auto"),
            "expected a whole number with engine.kind=sglang",
        ),
        (
            ("speculation.method=ngram", "speculation.draft_length=3"),
            "expected 1 with engine.kind=sglang: SGLang fills a longer n-gram draft with copies of token 0",
        ),
        (("engine.kv_at_swap=keep",), "engine.kv_at_swap='keep': expected recompute with engine.kind=sglang"),
        (("sampling.top_p=0.9",), "sampling.top_p=0.9: expected 1.0 with engine.kind=sglang"),
        (("sampling.top_k=5",), "sampling.top_k=5: expected 0 with engine.kind=sglang"),
        (("trainer.kind=mock",), "trainer.kind='mock': expected torch with engine.kind=sglang"),
    ],
)
def test_settings_that_sglang_does_not_support_are_refused(overrides, expected):
    load("tiny", [*SGLANG, f"engine.url={URL}"])
    with pytest.raises(ConfigError) as error:
        load("tiny", [*SGLANG, f"engine.url={URL}", *overrides])
    one_line(error, expected)
