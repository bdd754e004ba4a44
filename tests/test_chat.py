"""Messages become the text that transformers makes of them, and one BOS at most."""

import json
import re

import pytest
from directories import TINY, chat_model
from transformers import PreTrainedTokenizerFast

from asyncspec.cli import main
from asyncspec.config import ConfigError, load
from asyncspec.launch.preflight import check_inputs
from asyncspec.models import CheckpointError
from asyncspec.models.chat import FILE, ChatTemplate, parse_variables

MESSAGES = [
    {"role": "system", "content": "Answer in one word. <é>"},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2", "tool_calls": [{"name": "add", "arguments": {"é": "<1>"}}]},
    {"role": "user", "content": " and\n2+2? "},
]
TEMPLATES = [
    "{{ bos_token }}{% for m in messages %}[{{ m.role | upper }}] {{ m['content'] | trim }}{{ eos_token }}\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}[ASSISTANT]{% if enable_thinking is defined and not enable_thinking %} -{% endif %}"
    "{% endif %}",
    """{%- set ns = namespace(last=-1) -%}
    {% for m in messages %}
        {%- if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
        {%- if m.tool_calls %}
{{ m.tool_calls | tojson }} {{ m.tool_calls[0].arguments | tojson(indent=2) }}
        {% endif %}
        {%- if loop.index0 > 5 %}{% break %}{% endif %}
    {% endfor %}
{{ ns.last }} {{ tools is none }} {{ enable_thinking | default('?') }} {% generation %}x{% endgeneration %}
""",
]


@pytest.mark.parametrize("variables", [{}, {"enable_thinking": False}, {"enable_thinking": "low"}])
@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("in_file", [False, True])
def test_messages_are_rendered_as_by_transformers(tmp_path, template, variables, in_file):
    model = chat_model(tmp_path / "model", template, bos_token="<s>", eos_token={"content": "</s>"})
    if in_file:  # it comes before the one in tokenizer_config.json
        chat_model(tmp_path / "other", "no", bos_token="<s>", eos_token={"content": "</s>"})
        model = tmp_path / "other"
        (model / FILE).write_text(template)
    theirs = PreTrainedTokenizerFast(
        tokenizer_file=str(TINY / "tokenizer.json"), bos_token="<s>", eos_token="</s>", chat_template=template
    )
    expected = theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True, **variables)
    assert ChatTemplate(model).render(MESSAGES, variables) == expected


def test_variables_are_json_or_text():
    assert parse_variables("enable_thinking=false,effort=low,budget=3") == {
        "enable_thinking": False,
        "effort": "low",
        "budget": 3,
    }
    for bad, said in (("thinking", "'thinking' is not of the form"), ("messages=[]", "'messages' is set by asyncspec")):
        with pytest.raises(ConfigError, match=f"^data.template_variables='.*': {said}"):
            load("tiny", [f"data.template_variables={bad}"])


@pytest.mark.parametrize(
    "template, said",
    [
        (None, "has no chat template"),
        ("{% if %}", "chat template: Expected an expression, got 'end of statement block'; expected Jinja"),
        ("{{ raise_exception('no system message') }}", "line 1: .*TemplateError: no system message; expected messages"),
        ("{{ 1 // (messages | length - 1) }}", "line 1: .*ZeroDivisionError"),
        ("{{ ().__class__.__base__.__subclasses__() }}", "line 1: .*SecurityError"),
        ("{{ messages.append(1) }}", "line 1: .*SecurityError"),
        ("{% include '/etc/hostname' %}", "line 1: .*TypeError: no loader"),
    ],
)
def test_a_template_that_cannot_be_used_is_refused_before_the_start(tmp_path, template, said):
    """A template of a stranger's model gets nothing but the messages."""
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps({"prompt": MESSAGES[1:2], "answer": "2"}) + "\n")
    model = chat_model(tmp_path / "model", template)
    with pytest.raises(ConfigError, match=said) as caught:
        check_inputs(load("tiny", [f"model.path={model}", f"data.train_file={path}", "speculation.method=ngram"]))
    assert "\n" not in str(caught.value)


def test_a_template_that_is_no_text_is_refused(tmp_path):
    model = chat_model(tmp_path / "model", "")
    (model / FILE).write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match="expected a Jinja template"):
        ChatTemplate(model)


def test_data_show_prints_what_policy_and_reward_get(tmp_path, capsys):
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps({"prompt": MESSAGES[1:2], "answer": 2, "level": 7}) + "\n")
    model = chat_model(tmp_path / "model", "{{ messages[0].content[:3] }}={% if hint %}#{% endif %}")
    arguments = ["data", "show", f"model.path={model}", f"data.train_file={path}", "data.template_variables=hint=true"]
    assert main([*arguments, "--count", "1"]) == 0
    shown = capsys.readouterr().out
    assert "\n1+1=#\n" in shown and "'1'" in shown and "answer: '2'" in shown and '"level": 7' in shown
    shape = json.loads((model / "config.json").read_text()) | {"vocab_size": 80}  # no draft has been made for this one
    (model / "config.json").write_text(json.dumps(shape))
    assert main(arguments) == 0 and "\n1+1=#\n" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        main([*arguments, "--count", "-1"])
    assert "--count -1: expected 0 or more" in capsys.readouterr().err
    assert main([*arguments, "data.prompt_column=question"]) == 2
    assert "the columns are prompt, answer, level; data.prompt_column names" in capsys.readouterr().err


def failing(prompt, response, answer):
    raise ValueError("never")


def test_data_show_lets_the_policy_answer_and_the_reward_score(tmp_path, capsys):
    held_out = tmp_path / "eval.jsonl"
    held_out.write_text(json.dumps({"prompt": "3+4=", "answer": "7"}) + "\n")
    arguments = ["data", "show", f"data.train_file={held_out}", f"data.eval_file={held_out}", "--held-out"]
    assert main([*arguments, "--samples", "16", "deployment.device=cpu"]) == 0
    shown = capsys.readouterr().out
    found = re.findall(r"^response of \d+ tokens, reward ([01]): '(.*)'$", shown, flags=re.M)
    assert len(found) == 16 and len({response for _, response in found}) > 1
    assert all((reward == "1") == response.endswith("#7") for reward, response in found)
    assert any(reward == "1" for reward, _ in found)
    assert main([*arguments, "--samples", "1", "engine.max_prompt_tokens=2", "deployment.device=cpu"]) == 2
    assert "engine.max_prompt_tokens=2: a prompt has 4 tokens" in capsys.readouterr().err
    assert main([*arguments, "--samples", "1", "data.reward=test_chat:failing", "deployment.device=cpu"]) == 2
    assert "data.reward=test_chat:failing: failed for 1 of 1 responses; the first raised" in capsys.readouterr().err
