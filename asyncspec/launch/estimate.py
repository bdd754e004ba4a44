"""Estimates the memory of each actor, in bytes by purpose, from the configuration and the policy's config.json alone.

Weights and moments are exact, and so is the KV cache, up to its alignment (at most `LINE` positions a row).
pass_memory.py says what a pass needs; a draft model's activations follow Korthikanti et al. 2022, arXiv 2205.05198.
Where pieces of work follow one another, the largest one counts. `asyncspec bench memory` compares all of it with what
processes hold.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path

from asyncspec.config import Config, resolve_path
from asyncspec.config.work import moments, trained
from asyncspec.engine import LINE, PROMPT_ROWS
from asyncspec.launch.pass_memory import FLOAT, activations, bytes_of, head, layer_parameters, whole_in_a_pass
from asyncspec.models.headers import read_json
from asyncspec.models.sizes import draft_parameters, kv_bytes_per_token, parameters
from asyncspec.wire import BUCKET_BYTES

ADAM = 2 * FLOAT  # AdamW's two moments
# Activations of one pass of an unrolled draft, per token and unit of width, besides logits and attention weights.
# Measured.
UNROLLED = 31 * FLOAT
FEATURES = {"eagle3": 3, "mtp": 1, "draft_model": 0}  # features of a position that a draft takes, each of policy width
SORTED = 4 * FLOAT + 8  # per probability, while top-p and top-k sort it
MAPPED = 2  # bytes of each number of a policy's file, which is usually in 16 bits
LIBRARIES = 4.6e8  # the libraries that a process has loaded; measured on CPUs
COMPILED = 1.5e8  # numba and what it compiles, for a draft's heads on a CPU; measured
PAGES = 1.07  # of what the engine keeps in its own memory on a CPU, of which it takes 8 MiB at a time; measured


def draft_config(config: Config) -> dict:
    """Return the fields of the draft's config.json. Those that describe its heads are always there."""
    found = read_json(resolve_path(config.draft_directory) / "config.json")
    heads = found["num_attention_heads"]
    return found | {
        "num_key_value_heads": found.get("num_key_value_heads") or heads,
        "head_dim": found.get("head_dim") or found["hidden_size"] // heads,
    }


def rope_table(config: Config, policy: dict) -> float:
    """Bytes of the cosines and sines of all positions, which a policy's layers share."""
    return 2 * FLOAT * config.positions * policy["head_dim"]


def of_actor(config: Config, policy: dict, role: str, cpu: bool = False) -> dict[str, float]:
    """Bytes that an actor holds at most where it computes, by purpose. An actor that only waits holds its libraries.

    Args:
        policy: the content of the policy's config.json.
        role: as in topology.name_actors.
        cpu: whether it computes on a CPU, whose memory also holds what `beside` counts for a GPU's host.
    """
    if config.trainer.kind == "mock":
        return {"libraries": LIBRARIES}
    return {"libraries": LIBRARIES, **_of_role(config, policy, role, cpu)}


def on_host(config: Config, policy: dict, role: str) -> float:
    """Bytes of host memory that an actor on a node with GPUs holds at most."""
    if role == "generator" and config.engine.kind == "sglang":
        return sum(of_actor(config, policy, role).values())
    return LIBRARIES + beside(config, policy, role)


def beside(config: Config, policy: dict, role: str) -> float:
    """Bytes of host memory that an actor on a GPU holds at most: a block of the policy that it loads, a checkpoint that
    it writes, or the weights that adapters are added to.
    """
    if config.trainer.kind == "mock":
        return 0.0
    whole = bytes_of(config) * parameters(policy)
    if role.startswith("generator") and config.lora is not None:
        return whole / config.engine.tensor_parallel
    if role == "generator" and config.engine.kind == "torch":  # it loads the policy there
        return whole
    if role == "draft_adapter":
        return checkpoint_copy(config, policy, role)
    if not role.startswith(("trainer", "logprob")):
        return 0.0
    loading = loaded(config, policy, role, MAPPED + FLOAT)
    return loading if role.startswith("logprob") else max(loading, checkpoint_copy(config, policy, role))


def checkpoint_copy(config: Config, policy: dict, role: str) -> float:
    """Bytes of the copy that is written to a checkpoint while training goes on."""
    if role == "draft_adapter":
        return (FLOAT + ADAM) * draft_parameters(config.speculation.method, draft_config(config))
    share = config.trainer.replicas / config.trainer.ranks
    return (FLOAT * trained(config, policy) + moments(config, policy)) * share


def tensors(policy: dict) -> list[int]:
    """Numbers of the elements of a policy's tensors, in their order, without those of its norms and biases."""
    D, H = policy["hidden_size"], policy.get("head_dim") or policy["hidden_size"] // policy["num_attention_heads"]
    queries, keys = H * policy["num_attention_heads"], H * policy["num_key_value_heads"]
    experts = policy.get("num_experts") or policy.get("num_local_experts", 0)
    width = policy["moe_intermediate_size"] * experts if experts else policy["intermediate_size"]
    layer = [D * queries, D * keys, D * keys, queries * D, *[D * width] * 3]
    embedding = policy["vocab_size"] * D
    return [embedding, *layer * policy["num_hidden_layers"], *[embedding] * (not policy.get("tie_word_embeddings"))]


def buckets(config: Config, policy: dict) -> list[int]:
    """Bytes of the buckets of a version of whole weights, in their order; see `Layout.buckets`."""
    found, size = [], 0
    for elements in tensors(policy):
        size += bytes_of(config) * elements
        if size >= BUCKET_BYTES:
            found.append(size)
            size = 0
    return [*found, size] if size else found


def gathered(config: Config, policy: dict, role: str) -> float:
    """Bytes of a version's buckets on their way from several ranks to the first. Each rank has its part of one. The
    first one also has all parts of it, the whole, and two buckets that wait. Adapters are small.
    """
    ranks = config.trainer.ranks // config.trainer.replicas
    if ranks == 1 or config.lora is not None:
        return 0.0
    sizes = [0, 0, *buckets(config, policy)]
    if role != "trainer":
        return max(sizes) / ranks
    return max((2 + 1 / ranks) * now + before + first for first, before, now in zip(sizes, sizes[1:], sizes[2:]))


def loaded(config: Config, policy: dict, role: str, element: int) -> float:
    """Bytes of the largest block of a policy, which is read at once: the embedding, or a layer. A rank reads its part.

    Args:
        element: bytes of each number: MAPPED, and FLOAT more if it is cast to float32 on its way to another device.
    """
    trainer = config.trainer
    ranks = trainer.ranks // trainer.replicas if role.startswith("trainer") else config.logprob.ranks
    embedding = policy["vocab_size"] * policy["hidden_size"]
    layer = parameters(policy | {"num_hidden_layers": 1, "vocab_size": 0})
    if policy.get("num_experts") or policy.get("num_local_experts"):
        return max(element * embedding / ranks, MAPPED * layer + element * layer)  # experts are put together whole
    return element * max(embedding, layer) / ranks


OUTSIDE_VLLM = 3e9  # bytes of a GPU for CUDA, NCCL and graphs, which vLLM does not count


def with_vllm(config: Config, policy: dict, room: float) -> float:
    """Bytes of a GPU that a generator with vLLM fills: vLLM takes its share at the start, whatever it needs, and a
    version arrives beside it.

    Args:
        room: bytes of the GPU.
    """
    arriving = of_actor(config, policy, "generator")["arriving weights"]
    return config.engine.gpu_memory_utilization * room + arriving + OUTSIDE_VLLM


def vllm_positions(config: Config, policy: dict, room: float) -> float:
    """Positions that the KV cache of a generator with vLLM has room for: what its share of the GPU leaves beside the
    weights. vLLM's own working memory comes on top of these.

    Args:
        room: bytes of the GPU.
    """
    parts = of_actor(config, policy, "generator")
    cached = parts["KV cache of a sequence"] / (config.engine.max_prompt_tokens + config.sampling.max_response_tokens)
    beside = parts["weights"] + parts.get("draft", 0.0) / 2
    return (config.engine.gpu_memory_utilization * room - beside) / cached


def least_ranks(config: Config, policy: dict, room: float, above: int = 0) -> int:
    """Return the least engine.tensor_parallel, a power of two, with which weights, a sequence and an arriving version
    fit on GPUs of so many bytes; 0 if none up to 64 does.

    Args:
        above: more ranks than this.
    """
    config = copy.deepcopy(config)
    heads, keys = policy["num_attention_heads"], policy["num_key_value_heads"]
    for ranks in (1, 2, 4, 8, 16, 32, 64):
        if ranks <= above or heads % ranks or (keys % ranks and ranks % keys):
            continue
        config.engine.tensor_parallel = ranks
        if sum(of_actor(config, policy, "generator").values()) + OUTSIDE_VLLM <= room:
            return ranks
    return 0


# Parts whose size follows exactly from the configuration.
_EXACT = ("weights", "weights and gradients", "optimizer", "snapshot", "KV cache")


def at_least(config: Config, policy: dict, roles: Sequence[str]) -> dict[str, float]:
    """Return the bytes that actors hold at least, all of them together, by purpose.

    Args:
        policy: the content of the policy's config.json.
        roles: role of each actor.
    """
    found: dict[str, float] = {}
    for role in roles:
        for what, size in of_actor(config, policy, role).items():
            if what in _EXACT:
                found[what] = found.get(what, 0.0) + size
    return found


def _rotated_heads(policy: dict) -> float:
    """Heads that the engine rotates at once: the queries of a key-value head, its key, and its value by one."""
    return policy["num_attention_heads"] / policy["num_key_value_heads"] + 2


def _of_role(config: Config, policy: dict, role: str, cpu: bool) -> dict[str, float]:
    P, V, T = parameters(policy), policy["vocab_size"], trained(config, policy)
    frozen = 0 if config.lora is None else P
    longest = config.engine.max_prompt_tokens + config.sampling.max_response_tokens
    group = max(longest, min(config.trainer.tokens_per_pass, config.rl.group_size * longest))
    step = config.rl.groups_per_step * config.rl.group_size * longest
    trainer, element = config.trainer, bytes_of(config)
    if role in ("trainer", "trainer_rank"):
        share, sharing = trainer.replicas / trainer.ranks, trainer.tensor_parallel * trainer.context_parallel
        tokens = max(longest, min(trainer.tokens_per_pass, -(-step * sharing // trainer.ranks)))
        # A rank that adds up gradients once a step keeps its own whole until then.
        kept = FLOAT * T / trainer.tensor_parallel if trainer.ranks > 1 and trainer.gradient_sync == "step" else 0.0
        working = {
            "activations": activations(policy, element, tokens, trainer.recompute, cpu) / sharing,
            "logits": head(policy, element, trainer.tensor_parallel, False, config.rl.entropy_coef > 0, tokens),
            "weights and gradients that are whole": whole_in_a_pass(config, policy),
            "RoPE table": rope_table(config, policy),
            **({"gradients before they are added up": kept} if kept else {}),
        }
        # The pass, the optimizer's step and the gathering of a version follow one another. No gradients are left then.
        stepping = 2 * FLOAT * max(tensors(policy)) * share if not frozen else 0.0
        gathering, own = gathered(config, policy, role), FLOAT * T * share
        working |= {
            "optimizer's step": max(0.0, stepping - sum(working.values())),
            "buckets": max(0.0, gathering - own - max(stepping, sum(working.values()))),
        }
        return {
            "weights and gradients": FLOAT * (frozen + 2 * T) * share,
            "optimizer": moments(config, policy) * share,
            "snapshot": element * T * share,
            **({"checkpoint": checkpoint_copy(config, policy, role)} if cpu else {}),
            **{what: size for what, size in working.items() if size},
        }
    if role in ("logprob", "logprob_rank"):
        ranks = config.logprob.ranks
        # Without its adapters the policy is the usual reference.
        own = not frozen or config.model.reference_path not in ("", config.model.path)
        models = 2 if config.rl.kl_coef > 0 and own else 1
        found = {
            "weights": element * (P * models + (T if frozen else 0)) / ranks,
            "activations": activations(policy, element, group, cpu=cpu) / policy["num_hidden_layers"],
            "logits": head(policy, element, config.logprob.tensor_parallel, False, tokens=group),
            "RoPE table": rope_table(config, policy) * models,
        }
        if ranks == 1:
            return found | {"arriving weights": element * T}
        # Each rank keeps its share of a version, which arrives in whole buckets. A pass has the embedding whole, twice,
        # or a layer and the next one. The two seldom meet.
        parallel = config.logprob.tensor_parallel
        layer = layer_parameters(policy, parallel, config.logprob.expert_parallel)
        return found | {
            "arriving weights": element * T / ranks,
            "gathered weights": max(
                0 if frozen else max(buckets(config, policy)),
                element * max(2 * V * policy["hidden_size"] / parallel, 3 * layer),
            ),
        }
    if role == "generator" and config.engine.kind == "torch":
        verified = 1 + config.longest_draft  # tokens per row in one step
        positions = -(-(longest + verified) // LINE) * LINE
        cached, draft = (config.engine.slots + 1 + PROMPT_ROWS + config.kept) * positions, {}
        method = config.speculation.method
        if method in FEATURES:
            cfg = draft_config(config)
            own = cfg | {"num_hidden_layers": 1} if FEATURES[method] else cfg
            each = element * FEATURES[method] * cfg["hidden_size"] + kv_bytes_per_token(own, element)
            draft = {
                "draft": 3 * element * draft_parameters(method, cfg),
                "draft's features and cache": each * cached,
            }
        # For each token that may come next: its logit, the logit over the temperature, and its probability under the
        # target and under the draft.
        of_token = element + 3 * FLOAT + SORTED * (config.sampling.top_p < 1 or config.sampling.top_k > 0)
        # The engine's own forward pass has its own matrices besides the module's.
        own = element * P
        if cpu:
            own = PAGES * element * (P - (0 if policy.get("tie_word_embeddings") else V * policy["hidden_size"]))
            mixture = policy.get("num_experts") or policy.get("num_local_experts")
            own *= 2 if doubled() and element == FLOAT and not mixture else 1
        # On a CPU the policy is loaded beside its copy, and arriving adapters are added to frozen weights.
        arriving = max(element * P, element * T + element * frozen) if cpu else element * T
        return {
            "weights": element * P + own,
            "arriving weights": arriving,
            "RoPE table": rope_table(config, policy) * (1 + _rotated_heads(policy) / 2),
            "KV cache": kv_bytes_per_token(policy, element) * cached,
            "distributions": of_token * config.engine.slots * verified * V,
            **({"compiled code": COMPILED} if cpu and method in FEATURES else {}),
            **draft,
        }
    if role in ("generator", "generator_rank") and config.engine.kind == "vllm":
        # Ranks beyond the number of key-value heads hold copies of them.
        ranks = config.engine.tensor_parallel
        shares = min(ranks, policy["num_key_value_heads"])
        # Each of several ranks keeps its part of two versions: one waits for the other ranks, one arrives, tensor by
        # tensor. The embedding is the largest tensor that arrives, and the largest block that is loaded.
        arriving = T if ranks == 1 else 2 * T if frozen else 2 * P / ranks + 2 * V * policy["hidden_size"]
        cached, draft = kv_bytes_per_token(policy, element) / shares, {}
        if config.speculation.method in FEATURES:
            cfg = draft_config(config)
            own = cfg | {"num_hidden_layers": 1} if FEATURES[config.speculation.method] else cfg
            cached += kv_bytes_per_token(own, element) / shares
            # with one that arrives
            draft = {"draft": 2 * element * draft_parameters(config.speculation.method, cfg) / ranks}
        # vLLM gives its cache what engine.gpu_memory_utilization leaves. That must have room for one sequence.
        return {
            "weights": element * P / ranks,
            "arriving weights": element * arriving,
            "KV cache of a sequence": cached * longest,
            **draft,
        }
    if role == "generator" and config.engine.kind == "sglang":
        # twice: a copy, and a file in memory
        return {"arriving weights": 2 * element * T, "weights on their way to the server": 2 * element * P}
    if role == "draft_adapter":
        copy = {"checkpoint": checkpoint_copy(config, policy, role)} if cpu else {}
        return _of_draft(config, group, longest) | copy
    return {}


def doubled() -> bool:
    """Whether this host's engine keeps its float32 matrices twice, in oneDNN's order too; see engine/matrix.py."""
    text = Path("/proc/cpuinfo").read_text()
    return "AuthenticAMD" in text and "avx512f" in text


def _of_draft(config: Config, tokens: int, longest: int) -> dict[str, float]:
    """Bytes that the draft adapter holds at most, by purpose, without its libraries.

    Args:
        tokens: tokens in the first pass over a group, which the draft learns from.
        longest: positions of the longest sequence.
    """
    draft, unroll = draft_config(config), config.draft.unroll
    window = min(longest, config.draft.window or longest)
    tokens = min(tokens, config.rl.group_size * window)
    if config.speculation.method == "eagle3":
        vocabulary = draft.get("draft_vocab_size") or draft["vocab_size"]
        # Each unrolled pass keeps its logits and attention weights until the backward pass. The 2 are for the steps in
        # which a pass computes them.
        working = {
            "activations": unroll * UNROLLED * tokens * draft["hidden_size"],
            "logits": (unroll + 2) * FLOAT * tokens * vocabulary,
            "attention weights": (unroll + 2) * FLOAT * tokens * draft["num_attention_heads"] * window,
        }
    else:
        working = {
            "activations": 2 * 34 * tokens * draft["hidden_size"] * draft["num_hidden_layers"],
            "logits": 3 * FLOAT * tokens * draft["vocab_size"],
        }
    P = draft_parameters(config.speculation.method, draft)
    return {"weights and gradients": 2 * FLOAT * P, "optimizer": ADAM * P, "snapshot": FLOAT * P, **working}
