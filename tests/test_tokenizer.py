"""Prompts become the tokens that transformers would make of them, and errors of the tokenizers library are one line."""

import json

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from asyncspec.config import resolve_path
from asyncspec.console import terminal
from asyncspec.models import CheckpointError
from asyncspec.models.tokenizer import encode_prompt, encode_prompts, encode_responses, load, loses
from asyncspec.tasks.prompts import BATCH, encoded_prompts, encoded_responses

TINY = resolve_path("asset:tiny/policy")
PROMPT = "12+34+56+78+9="
BEGIN, END, UNKNOWN = "<s>", "</s>", "<unk>"
LETTERS = {token: i for i, token in enumerate([UNKNOWN, BEGIN, END, *"abcdefgh ", "\n"])}


def changed(directory, **settings):
    """Write the shipped policy's tokenizer with other settings in tokenizer.json; return the directory."""
    content = json.loads((TINY / "tokenizer.json").read_text())
    model = settings.pop("model", {})
    content |= settings | {"model": content["model"] | model}
    (directory / "tokenizer.json").write_text(json.dumps(content))
    (directory / "tokenizer_config.json").write_bytes((TINY / "tokenizer_config.json").read_bytes())
    return directory


def letters(template="$A", **options):
    """A tokenizer of letters whose post-processor puts tokens around the text."""
    made = Tokenizer(models.BPE(vocab=LETTERS, merges=[], **options))
    made.decoder = decoders.Fuse()
    made.add_special_tokens([BEGIN, END])
    made.post_processor = processors.TemplateProcessing(
        single=template, pair=f"{template} $B", special_tokens=[(token, LETTERS[token]) for token in (BEGIN, END)]
    )
    return made


@pytest.mark.parametrize(
    "settings",
    [
        {"truncation": {"max_length": 8, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}},
        {"truncation": {"max_length": 8, "strategy": "LongestFirst", "stride": 2, "direction": "Left"}},
        {
            "padding": {
                "strategy": {"Fixed": 32},
                "direction": "Left",
                "pad_to_multiple_of": None,
                "pad_id": 0,
                "pad_type_id": 0,
                "pad_token": "<pad>",
            }
        },
        {
            "padding": {
                "strategy": "BatchLongest",
                "direction": "Right",
                "pad_to_multiple_of": 64,
                "pad_id": 0,
                "pad_type_id": 0,
                "pad_token": "<pad>",
            }
        },
    ],
)
def test_prompts_are_neither_cut_off_nor_padded(settings, tmp_path):
    ours = load(changed(tmp_path, **settings))
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert encode_prompt(ours, PROMPT) == theirs(PROMPT).input_ids
    assert [prompt.tokens for prompt in encode_prompts(ours, [PROMPT, "1+1="])] == theirs([PROMPT, "1+1="]).input_ids


def test_the_same_prompt_always_has_the_same_tokens(tmp_path):
    merges = {"vocab": json.loads((TINY / "tokenizer.json").read_text())["model"]["vocab"] | {"12": 62, "34": 63}}
    ours = load(changed(tmp_path, model=merges | {"merges": [["1", "2"], ["3", "4"]], "dropout": 0.5}))
    assert {tuple(encode_prompt(ours, "1234" * 8)) for _ in range(50)} == {(62, 63) * 8}


@pytest.mark.parametrize("template", ["$A", "<s> $A", "<s> $A </s>", "<s> <s> $A", "$A </s>"])
@pytest.mark.parametrize("text", ["abc", "<s>", "<s>abc", "<s><s>abc", "a<s>b", "abc</s>"])
def test_a_beginning_that_the_text_has_is_not_added_again(template, text, tmp_path):
    made, before = letters(template), [LETTERS[BEGIN]] * template.count(BEGIN)
    made.save(str(tmp_path / "tokenizer.json"))
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))(text).input_ids
    (prompt,) = encode_prompts(load(tmp_path), [text])
    twice = before and prompt.own[: len(before)] == before
    assert theirs == [*before, *prompt.own, *prompt.appended]
    assert prompt.tokens == (theirs[len(before) :] if twice else theirs) == encode_prompt(made, text)
    assert prompt.appended == [LETTERS[END]] * template.count(END)
    assert bool(twice) == (text.startswith(BEGIN * len(before)) and bool(before))


def test_nothing_is_added_around_a_response():
    assert encode_responses(letters("<s> $A </s>"), ["ab", ""]) == [[LETTERS["a"], LETTERS["b"]], []]


def words(unknown=UNKNOWN):
    made = Tokenizer(models.WordLevel(vocab=LETTERS | {"ab": 20, "cd": 21}, unk_token=unknown))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.add_special_tokens([UNKNOWN])
    return made


def byte_level():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.post_processor = processors.ByteLevel(trim_offsets=True)
    return made


def with_normalizer(normalizer, **options):
    made = letters(**options)
    made.normalizer = normalizer
    return made


@pytest.mark.parametrize(
    "tokenizer,kept,lost",
    [
        (letters("<s> $A"), ["abc", "a\nb c ", "<s>abc</s>", " a"], ["aXb", "é", "abé ", "a b\u0301 c"]),
        (letters(unk_token=UNKNOWN), ["abc", "<s>a</s>"], ["aXb", "X"]),
        (words(), ["ab cd", " ab\n\ncd ", "ab <unk>"], ["ab ef", "abcd"]),
        (byte_level(), ["abc é\u0301 \U0001f600", "  a ", "\u1112\u1161\u11ab"], []),
        (with_normalizer(normalizers.Lowercase()), ["ABC aBc"], ["ABX"]),
        (with_normalizer(normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])), ["é\u0301"], ["ö"]),
        (
            Tokenizer(models.Unigram([(UNKNOWN, 0.0), ("a", -1.0), ("b", -2.0)], unk_id=0)),
            ["abba", "ab<unk>"],
            ["abz", "zz"],
        ),
    ],
    ids=["no unknown token", "unknown token", "words", "bytes", "lower case", "accents", "unigram"],
)
def test_only_characters_that_the_tokenizer_does_not_know_are_lost(tokenizer, kept, lost):
    for text in [*kept, *lost]:
        (prompt,) = encode_prompts(tokenizer, [text])
        assert loses(tokenizer, prompt) == (text in lost), text


def test_composing_characters_loses_none():
    made = byte_level()
    made.normalizer = normalizers.NFC()
    (prompt,) = encode_prompts(made, ["e\u0301 \u1112\u1161\u11ab"])  # composed, these are two characters
    assert made.decode(prompt.own) == "\xe9 \ud55c" and not loses(made, prompt)


@pytest.mark.parametrize(
    "content",
    [
        b"{}",
        b"",
        b"null",
        b"\xff\xfe{}",
        (TINY / "tokenizer.json").read_bytes()[:300],
        pytest.param(b"[" * 100_000, id="deep"),
    ],
)
def test_a_damaged_file_gives_one_line_that_names_it(content, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=f"^{tmp_path}/tokenizer.json: .*; expected the tokenizer.json") as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_post_processor_that_names_an_undefined_token_gives_one_line(tmp_path):
    letters("<s> $A").save(str(tmp_path / "tokenizer.json"))
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["post_processor"]["special_tokens"] = {}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=f"^{tmp_path}/tokenizer.json: "):
        load(tmp_path)


def test_a_missing_file_or_a_directory_in_its_place_is_refused(tmp_path):
    for make in (lambda: None, (tmp_path / "tokenizer.json").mkdir):
        make()
        with pytest.raises(CheckpointError, match="no such file"):
            load(tmp_path)


def test_a_prompt_that_the_tokenizer_cannot_encode_is_named():
    tokenizer = words(unknown="<none>")
    with pytest.raises(CheckpointError, match="^prompt 'ab zz': WordLevel error: Missing .UNK. token") as caught:
        encode_prompts(tokenizer, ["ab", "ab zz", "cd"])
    assert "\n" not in str(caught.value)


def encoded(tokenizer, *texts, vocab_size=64, console=None):
    return list(encoded_prompts(tokenizer, texts, vocab_size, console or terminal(width=200)))


def test_prompts_are_encoded_in_order_over_several_batches():
    texts = [f"a{'b' * (i % 7)}" for i in range(2 * BATCH + 5)]
    assert [prompt.text for prompt in encoded(letters(), *texts)] == texts


@pytest.mark.parametrize("shown", [True, False], ids=["terminal", "file"])
def test_long_encoding_shows_how_far_it_is(shown, monkeypatch, capsys):
    monkeypatch.setattr("asyncspec.tasks.prompts.QUIET_S", -1.0)
    monkeypatch.setattr("asyncspec.tasks.prompts.LINE_EVERY_S", -1.0)
    encoded(letters(), *["a"] * (BATCH + 1), console=terminal(force_terminal=shown, width=100))
    out = capsys.readouterr().out
    assert ("encoding prompts" if shown else "1,000 of 1,001 prompts encoded\n1,001 of 1,001") in out


def test_prompts_that_an_engine_would_refuse_are_refused():
    stripped = with_normalizer(normalizers.Strip(), template="<s> $A")
    for tokenizer, bad in ((letters(), "X"), (stripped, "  ")):  # the second one has only what the tokenizer adds
        with pytest.raises(ValueError, match=f"^prompt '{bad}': has no token that the policy knows; expected at least"):
            encoded(tokenizer, "abc", bad)
    with pytest.raises(ValueError, match="^prompt 'abh': its token 'h' has the number 10; expected less than 10, "):
        encoded(letters(), "abc", "abh", vocab_size=10)
    with pytest.raises(ValueError, match="^response 'abh': its token 'h' has the number 10; expected less than 10, "):
        list(encoded_responses(letters(), ["", "abh"], 10, terminal()))


def test_warnings_say_what_the_policy_gets(capsys):
    encoded(letters("<s> $A"), "<s>abc", "abc</s>")
    assert capsys.readouterr().out == ""
    encoded(letters("<s> $A"), "<s>aXb", "b\xe9a", "ab")
    assert capsys.readouterr().out == (
        "warning: 2 of 3 prompts have characters that the tokenizer does not know: the policy gets '<s>aXb' as "
        "'<s>ab'\n"
    )
    encoded(letters("$A </s>"), "abc")
    assert capsys.readouterr().out == (
        "warning: tokenizer.json adds '</s>' behind every prompt; the policy's responses begin behind it\n"
    )


@pytest.mark.parametrize(
    "file, content",
    [
        ("tokenizer_config.json", {"added_tokens_decoder": {"62": {"content": "<|im_start|>", "special": True}}}),
        ("tokenizer_config.json", {"extra_special_tokens": {"chat": "<|im_start|>"}}),
        ("added_tokens.json", {"<|im_start|>": 62}),
        ("special_tokens_map.json", {"additional_special_tokens": ["<|im_start|>"]}),
    ],
)
def test_tokens_that_only_another_file_adds_are_refused(tmp_path, file, content):
    """transformers reads them as one token each, and tokenizer.json alone would give characters."""
    (tmp_path / "tokenizer.json").write_bytes((TINY / "tokenizer.json").read_bytes())
    (tmp_path / file).write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="<|im_start|>.*which tokenizer.json does not add"):
        load(tmp_path)
    tokenizer = load(TINY)
    tokenizer.add_special_tokens(["<|im_start|>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    load(tmp_path)
