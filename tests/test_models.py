"""Checkpoints: the same logits as transformers on the same files, and clear errors."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from asyncspec.config import resolve_path
from asyncspec.files import write_json
from asyncspec.models import CheckpointError, eagle3, policy, tokenizer
from asyncspec.models.hf_files import read_tensors, write_checkpoint
from asyncspec.models.shape import ARCHITECTURES, Experts
from asyncspec.models.widen import widened

TINY = resolve_path("asset:tiny/policy")


@pytest.fixture
def saved(tmp_path, small_policy, small_shape):
    policy.save(small_policy, small_shape, tmp_path)
    return tmp_path


def logits(model, tokens):
    with torch.no_grad():
        return model.lm_head(policy.hidden_states(model, tokens))


@pytest.mark.parametrize("which", ["shipped", "untied"])
def test_logits_equal_transformers(which, request, small_shape):
    from transformers import Qwen3ForCausalLM

    path = TINY if which == "shipped" else request.getfixturevalue("saved")
    ours, shape = policy.load(path)
    theirs = Qwen3ForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    tokens = torch.randint(0, shape.vocab_size, (3, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = theirs(tokens).logits
    torch.testing.assert_close(logits(ours, tokens), expected, atol=2e-4, rtol=1e-4)


def test_saving_and_loading_is_exact(saved, small_policy, small_shape):
    loaded, shape = policy.load(saved)
    assert shape == small_shape
    tokens = torch.randint(0, 6, (2, 10))
    assert torch.equal(logits(loaded, tokens), logits(small_policy, tokens))


def test_other_families_match_transformers_on_the_same_files(tmp_path, other):
    """transformers computes the same logits from our files, and we load the same tensors from its files."""
    from transformers import AutoModelForCausalLM

    shape, model = other
    policy.save(model, shape, tmp_path / "ours")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32, attn_implementation="eager")
    assert type(theirs).__name__ == ARCHITECTURES[shape.model_type]
    tokens = torch.randint(0, shape.vocab_size, (3, 60), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(logits(model, tokens), theirs(tokens).logits, atol=1e-4, rtol=0)
    theirs.save_pretrained(tmp_path / "theirs")
    for directory in (tmp_path / "ours", tmp_path / "theirs"):
        loaded, read = policy.load(directory)
        assert read == shape
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, loaded.state_dict()[name]), name


def test_only_the_parameters_of_a_policy_are_saved(other):
    """The buffers with which torchtitan counts and balances experts are neither saved nor broadcast. And a skeleton
    model without parameters is enough to name them.
    """
    shape, model = other
    saved = policy.adapter(model.config).to_hf(model.state_dict())
    assert sum(t.numel() for t in saved.values()) == sum(p.numel() for p in model.parameters())
    named = policy.to_hf(policy.skeleton(shape), dict(model.named_parameters()))
    assert named.keys() == saved.keys() and all(torch.equal(named[name], saved[name]) for name in saved)


def test_other_families_give_nearly_the_same_logits_in_bfloat16(other):
    shape, model = other
    low = policy.build(shape)
    low.load_state_dict(model.state_dict())
    policy.cast(low, torch.bfloat16)
    tokens = torch.randint(0, shape.vocab_size, (3, 60), generator=torch.Generator().manual_seed(0))
    apart = (logits(low, tokens).float() - logits(model, tokens)).abs()
    # For single tokens the router may choose other experts, so the median is compared.
    assert 0 < apart.median() < 0.02 * logits(model, tokens).std()


@pytest.mark.parametrize(
    "kind, change, message",
    [
        (
            "llama",
            {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
            "rope_type='dynamic': expected 'default', 'llama3' or 'yarn'",
        ),
        ("qwen2", {"rope_scaling": {"type": "yarn"}}, "field 'factor' is missing"),
        ("qwen2", {"rope_scaling": {"type": "yarn", "factor": "4"}}, "factor='4': expected a finite number above 0"),
        ("qwen3", {"rope_scaling": {"type": "yarn", "factor": 4, "beta_fast": -1}}, "beta_fast=-1: expected a finite"),
        ("qwen3", {"rope_scaling": {"type": "yarn", "factor": 4, "truncate": 1}}, "truncate=1: expected true or"),
        ("qwen3", {"rope_theta": 1, "rope_scaling": {"type": "yarn", "factor": 4}}, "rope_theta=1: expected more than"),
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window=True: expected False"),
        ("mistral", {"sliding_window": ...}, "sliding_window=4096 with model_type='mistral': expected null"),
        ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "field 'low_freq_factor' is missing"),
        ("llama", {"attention_bias": True}, "attention_bias=True: expected False"),
        ("llama", {"eos_token_id": [1, 128009]}, "expected a token below vocab_size=6"),
        (
            "qwen3",
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4, "high_freq_factor": 4}},
            "high_freq_factor=4: expected more than low_freq_factor=4",
        ),
        ("qwen3_moe", {"mlp_only_layers": [0]}, r"mlp_only_layers=\[0\]: expected \[\]"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step=2: expected 1"),
        ("qwen3_moe", {"num_experts_per_tok": 9}, "num_experts_per_tok=9: expected 1 to num_experts=4"),
        ("gemma3", {}, "model_type='gemma3': expected 'qwen3', 'qwen2', 'llama', 'mistral', 'qwen3_moe'"),
    ],
)
def test_unsupported_fields_of_a_policy_config_are_refused_in_one_line(tmp_path, small_shape, kind, change, message):
    shape = replace(small_shape, experts=Experts(4, 2, 16, True)) if kind == "qwen3_moe" else small_shape
    fields = shape.to_hf() | {"model_type": kind, "architectures": [ARCHITECTURES.get(kind)]} | change
    write_json(tmp_path / "config.json", {name: value for name, value in fields.items() if value is not ...})
    with pytest.raises(CheckpointError, match=message) as caught:
        policy.PolicyShape.from_hf(tmp_path)
    assert "\n" not in str(caught.value)


def test_the_shipped_tokenizer_decodes_what_it_encodes():
    tok = tokenizer.load(TINY)
    text = "48+7+35=48+7=55,55+35=90,#90"
    assert tok.decode(tok.encode(text).ids) == text


def test_transformers_loads_the_shipped_tokenizer():
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(TINY)
    assert theirs("48+7=").input_ids == tokenizer.load(TINY).encode("48+7=").ids


def corrupt(path, change):
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


@pytest.mark.parametrize(
    "change,message",
    [
        (lambda t: t.pop("model.norm.weight"), "norm.weight is missing"),
        (lambda t: t.update({"model.norm.weight": torch.ones(3)}), "has shape"),
        (lambda t: t["model.norm.weight"].fill_(float("nan")), "not finite"),
    ],
)
def test_broken_tensors_are_named(saved, change, message):
    corrupt(saved, change)
    with pytest.raises(CheckpointError, match=message):
        policy.load(saved)


def test_broken_files_are_named(saved):
    (saved / "model.safetensors").write_bytes(b"\x00" * 20)
    with pytest.raises(CheckpointError, match="model.safetensors"):
        policy.load(saved)
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps(config | {"model_type": "gpt2"}))
    with pytest.raises(CheckpointError, match="expected 'qwen3', 'qwen2', 'llama', 'mistral', 'qwen3_moe'"):
        policy.load(saved)


@pytest.mark.parametrize(
    "index,message",
    [
        ("{", "expected an object whose weight_map names each tensor's file"),
        ("[]", "expected an object whose weight_map"),
        ("{}", "expected an object whose weight_map"),
        ('{"weight_map": ["a.safetensors"]}', "expected an object whose weight_map"),
        ('{"weight_map": {"model.norm.weight": 3}}', "expected an object whose weight_map"),
        (b'{"weight_map": "\xff"}', "expected an object whose weight_map"),
        (
            '{"weight_map": {"lm_head.weight": "model.safetensors", "model.norm.weight": "model-2.safetensors", "x": '
            '"model-3.safetensors"}}',
            "names 'model-2.safetensors', which is not in the directory .2 files are missing",
        ),
    ],
)
def test_a_damaged_index_is_named(saved, index, message):
    file = saved / "model.safetensors.index.json"
    file.write_text(json.dumps({"weight_map": {"lm_head.weight": "model.safetensors"}}))
    policy.load(saved)
    file.write_bytes(index if isinstance(index, bytes) else index.encode())
    with pytest.raises(CheckpointError, match=f"^{file}: {message}") as caught:
        policy.load(saved)
    assert "\n" not in str(caught.value)


def test_a_draft_of_another_shape_is_refused(tmp_path, small_shape, contrary_draft):
    eagle3.save(contrary_draft, tmp_path)
    loaded = eagle3.load(tmp_path, small_shape)
    for name, tensor in contrary_draft.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name])
    from dataclasses import replace

    with pytest.raises(CheckpointError, match="vocab_size=6"):
        eagle3.load(tmp_path, replace(small_shape, vocab_size=7))


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_draft_loss_unrolls_as_the_engine_drafts(small_shape, small_policy, contrary_draft, contrary_mtp, kind):
    """Training pass j must see the same keys and values as the drafter's KV cache holds at its (j+1)-th token."""
    from asyncspec.drafters.make import drafter_for
    from asyncspec.drafts.draft import Draft
    from asyncspec.drafts.supervision import supervise
    from asyncspec.drafts.training import _UnrolledAttention
    from asyncspec.engine.backend import Target, backend_for
    from asyncspec.speculation.drafter import Slots
    from asyncspec.speculation.verify import AS_IS

    draft = contrary_draft if kind == "eagle3" else contrary_mtp
    tokens = torch.randint(2, 6, (1, 12), generator=torch.Generator().manual_seed(1))
    made = supervise(small_policy, draft.aux_layers, tokens, torch.ones(1, 12, dtype=torch.bool), 1.0)
    features, embeds = made.features_BLE, made.embeds_BLD
    T, unroll = 10, 3
    rope, attend = draft.rope(torch.arange(T).expand(1, T)), _UnrolledAttention(T, "cpu")
    hidden, trained = draft.fuse(features[:, :T]), []
    with torch.no_grad():
        for _ in range(unroll):
            out = draft(hidden, embeds[:, 1 : T + 1], rope, attend)
            trained.append(draft.logits(out))
            hidden = torch.nn.functional.pad(out[:, :-1], (0, 0, 1, 0))
        slots = Slots(1, 32, "cpu")
        target = Target(small_policy, slots, AS_IS, backend_for("cpu", torch.float32))
        drafter = drafter_for(Draft(kind, draft, small_shape))(target)
        n = 6  # known tokens; the draft prefills positions 0..n-2
        slots.token_SP[:, :12], slots.length_S[:] = tokens, n
        drafter.enter(0, 1)
        drafter.observe(0, features[:, : n - 1].chunk(len(draft.aux_layers), -1), torch.arange(n - 1)[None])
        drafter._read_before(0, slots.length_S - 2, drafter.behind(1) - 1)
        drafted, decode, space = [], drafter.decode, drafter.decode.spaces(1, 1)
        drafter._fuse(0, slots.length_S.unsqueeze(1) - 2, space)
        for j in range(unroll):  # teacher-forced: the sequence's tokens stand in for the draft's own
            position = torch.tensor([[n - 2 + j]])
            space.embedding_TD.copy_(small_policy.tok_embeddings(tokens[0, n + j - 1 : n + j]))
            decode(space, decode.cache.at(0, position, [(1, n - 1 + j)]), decode.rope.at(position))
            drafted.append(decode.logits(space))
    for j in range(unroll):
        torch.testing.assert_close(drafted[j], trained[j][:, n - 2 + j], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("tied", [False, True])
def test_an_mtp_module_is_loaded_as_it_was_saved(tmp_path, small_shape, small_policy, contrary_mtp, tied):
    from asyncspec.models import mtp

    mtp.save(contrary_mtp, tmp_path)
    loaded = mtp.load(tmp_path, replace(small_shape, tied=tied), small_policy.lm_head.weight)
    for name, tensor in contrary_mtp.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name])
    broken = {k: v for k, v in read_tensors(tmp_path).items() if k != "mtp.fc.weight"}
    write_checkpoint(tmp_path, small_shape.to_hf(), broken)
    with pytest.raises(CheckpointError, match="mtp.fc.weight"):
        mtp.load(tmp_path, small_shape, small_policy.lm_head.weight)


@pytest.mark.parametrize("factor", [2, 3])
def test_wider_heads_change_no_logit(tmp_path, factor):
    check_wider(TINY, tmp_path, factor)


def test_wider_heads_change_no_logit_of_other_families(tmp_path, other):
    shape, model = other
    policy.save(model, shape, tmp_path / "narrow")
    check_wider(tmp_path / "narrow", tmp_path / "wide", 2)


def check_wider(source, target, factor):
    widened(source, target, factor)
    (narrow, shape), (wide, wider) = policy.load(source), policy.load(target)
    assert wider.head_dim == factor * shape.head_dim
    tokens = torch.randint(0, shape.vocab_size, (3, 40), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(logits(wide, tokens), logits(narrow, tokens), atol=2e-4, rtol=1e-4)


def test_wider_heads_change_no_logit_of_a_draft(tmp_path):
    _, shape = policy.load(TINY)
    widened(TINY.parent / "eagle3", tmp_path, 2)
    generator = torch.Generator().manual_seed(0)
    hidden_BLD, embeds_BLD = (torch.randn(2, 30, shape.dim, generator=generator) for _ in range(2))

    def attend(q_BLNH, k_BLNH, v_BLNH):
        q, k, v = (t.transpose(1, 2) for t in (q_BLNH, k_BLNH, v_BLNH))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(
            1, 2
        )

    logits = []
    for directory in (TINY.parent / "eagle3", tmp_path):
        draft = eagle3.load(directory, shape)
        with torch.no_grad():
            rope = draft.rope(torch.arange(30).expand(2, -1))
            logits.append(draft.logits(draft(hidden_BLD, embeds_BLD, rope, attend)))
    torch.testing.assert_close(*logits, atol=2e-4, rtol=1e-4)


def test_named_parameters_are_saved_like_the_whole_model(saved, small_policy, small_shape):
    for shape, model, directory in (
        (small_shape, small_policy, saved),
        (policy.load(TINY)[1], policy.load(TINY)[0], TINY),
    ):
        skeleton = policy.skeleton(shape)
        written, expected = policy.to_hf(skeleton, dict(model.named_parameters())), read_tensors(directory)
        assert written.keys() == expected.keys() and all(
            torch.equal(written[name], expected[name]) for name in expected
        )
        assert all(p.is_meta for p in skeleton.parameters())
        assert {n: p.shape for n, p in skeleton.named_parameters()} == {n: p.shape for n, p in model.named_parameters()}


@pytest.mark.slow
def test_deferred_compilation_computes_the_same_and_loads_no_compiler():
    from asyncspec.loading import compiling_later

    compile_now = torch.compile
    with compiling_later():
        doubled = torch.compile(lambda x: 2 * x, backend="eager")
    assert torch.compile is compile_now and doubled(torch.tensor(3)) == 6
    loaded = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys, asyncspec.models.policy; print('torch._inductor.compile_fx' in sys.modules)",
        ],
        capture_output=True,
        text=True,
    )
    assert loaded.stdout.strip() == "False", loaded.stderr
