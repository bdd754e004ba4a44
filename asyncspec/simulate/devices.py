"""What a forward pass costs on GPUs: from measured tables where there are some, else from a roofline.

A pass of `batch` sequences with `queries` tokens each, which attend to `context` positions, takes

    rest(batch * queries) + head(batch * queries) + attention(batch, context, queries)

seconds. tables/*.json have the three for some models, see scripts/make_device_tables.py. A model is known by the sizes
in its config.json, so that a fine-tuned one has the table of its base. Beyond a table its edge is taken, and `clipped`
says so.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from asyncspec.config.fields import hint
from asyncspec.errors import UserError
from asyncspec.models import sizes

TABLES = Path(__file__).parent / "tables"
PRECISIONS = {"bfloat16": 2, "fp8": 1}  # bytes of a weight
# Of a roofline: the shares of the memory's and the arithmetic units' speed that kernels reach, the seconds of a kernel
# that does nothing, and the kernels of a layer. They are round numbers of the field, fitted to nothing here.
MEMORY_SHARE, FLOPS_SHARE, KERNEL_S, KERNELS = 0.8, 0.7, 2e-6, 10
ALL_REDUCE_S = 10e-6  # the latency of a sum over ranks
EAGLE3_VOCABULARY = 32_000  # tokens that an EAGLE-3 draft of a large policy usually proposes


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU. Speeds are of one GPU in one direction, without sparsity."""

    name: str
    memory_bytes_s: float
    memory_bytes: float
    flops: float  # of bfloat16 a second
    flops_fp8: float  # 0: it has no fp8
    gpus_per_node: int
    nvlink_gpus: int  # that are joined by NVLink
    node_bytes_s: float  # between these
    network_bytes_s: float  # between nodes

    def peak(self, precision: str) -> float:
        return self.flops_fp8 or self.flops if precision == "fp8" else self.flops


@cache
def _file(gpu: str) -> dict:
    return json.loads((TABLES / f"{gpu.lower()}.json").read_text())


def gpus() -> list[str]:
    """Return the names of the known GPUs."""
    return sorted(path.stem.upper() for path in TABLES.glob("*.json"))


def gpu(name: str) -> Gpu:
    """Return a kind of GPU by its name, in any case.

    Raises:
        UserError: it is not known.
    """
    if name.upper() not in gpus():
        raise UserError(f"--hardware {name}: expected one of {', '.join(gpus())}, or this" + hint(name.upper(), gpus()))
    return Gpu(name.upper(), **_file(name)["gpu"])


class Forward(ABC):
    """The cost of a model's forward pass on the GPUs of a replica. Subclasses have rest, head and attend."""

    source: str  # "table" or "roofline"

    def __init__(self, gpu: Gpu, model: Mapping[str, Any], precision: str, degree: int) -> None:
        """
        Args:
            model: the fields of config.json.
            precision: of the weights, a key of PRECISIONS.
            degree: the tensor parallel degree, the GPUs of the replica.
        """
        self.gpu, self.model, self.precision, self.degree = gpu, model, precision, degree
        self.clipped: set[str] = set()
        heads, keys = model["num_attention_heads"], model["num_key_value_heads"]
        self._heads = heads / max(degree, keys)  # query heads that share a key-value head on a GPU

    @abstractmethod
    def rest(self, tokens: float) -> float:
        """Return the seconds of a pass over so many tokens without attention and head."""

    @abstractmethod
    def head(self, tokens: float) -> float:
        """Return the seconds of the head."""

    @abstractmethod
    def attend(self, batch: float, context: float) -> float:
        """Return the seconds of attention of one token of each sequence."""

    def attention(self, batch: float, context: float, queries: int = 1) -> float:
        """Return the seconds of attention. Keys and values are read once for all queries of a sequence. So the time is
        that of one query, until there are so many that arithmetic takes longer than reading: a key of 2 bytes takes
        2 operations for each query, and so does a value.
        """
        gpu = self.gpu
        most = (gpu.flops * FLOPS_SHARE) / (gpu.memory_bytes_s * MEMORY_SHARE)
        return self.attend(batch, context) * max(1.0, queries * self._heads / most)

    def seconds(self, batch: float, context: float, queries: int = 1) -> float:
        """Return the seconds of a pass."""
        tokens = batch * queries
        return self.rest(tokens) + self.head(tokens) + self.attention(batch, context, queries)


class Roofline(Forward):
    """The cost from the device's speeds: whichever takes longer, the memory or the arithmetic."""

    source = "roofline"

    def __init__(self, gpu: Gpu, model: Mapping[str, Any], precision: str, degree: int) -> None:
        super().__init__(gpu, model, precision, degree)
        self._layers, self._width = model["num_hidden_layers"], model["hidden_size"]
        self._experts = model.get("num_experts") or model.get("num_local_experts") or 0
        self._per_token = model.get("num_experts_per_tok") or 0
        body = sizes.parameters(dict(model) | {"vocab_size": 0})
        of_experts = 3 * self._width * model["moe_intermediate_size"] * self._layers if self._experts else 0
        self._expert = of_experts  # weights of one expert in each layer
        self._dense = body - of_experts * self._experts
        self._vocabulary = model["vocab_size"] * self._width

    def _longer(self, weights: float, computed: float) -> float:
        """Return the seconds to read `weights` numbers and to multiply `computed` pairs of numbers."""
        read = weights * PRECISIONS[self.precision] / (self.gpu.memory_bytes_s * MEMORY_SHARE)
        return max(read, 2 * computed / (self.gpu.peak(self.precision) * FLOPS_SHARE)) / self.degree

    def loaded(self, tokens: float) -> float:
        """Return how many of a layer's experts so many tokens need, if each picks its own at random."""
        if not self._experts:
            return 0.0
        return self._experts * (1 - (1 - self._per_token / self._experts) ** tokens)

    def rest(self, tokens: float) -> float:
        weights = self._dense + self._expert * self.loaded(tokens)
        computed = tokens * (self._dense + self._expert * self._per_token)
        sums = 0.0
        if self.degree > 1:
            moved = 2 * tokens * self._width * 2 * (self.degree - 1) / self.degree
            sums = 2 * self._layers * (ALL_REDUCE_S + moved / self.gpu.node_bytes_s)
        return self._longer(weights, computed) + self._layers * KERNELS * KERNEL_S + sums

    def head(self, tokens: float) -> float:
        return self._longer(self._vocabulary, tokens * self._vocabulary) + KERNEL_S

    def attend(self, batch: float, context: float) -> float:
        held = min(self.degree, self.model["num_key_value_heads"])
        read = batch * context * sizes.kv_bytes_per_token(dict(self.model), 2) / held
        return read / (self.gpu.memory_bytes_s * MEMORY_SHARE) + self._layers * KERNEL_S


class Tables(Forward):
    """The cost from measured tables."""

    source = "table"

    def __init__(self, gpu: Gpu, model: Mapping[str, Any], precision: str, degree: int, found: dict) -> None:
        super().__init__(gpu, model, precision, degree)
        axes = _file(gpu.name)
        self._tokens, self._batches, self._contexts = (
            np.array(axes[name], float) for name in ("tokens", "batches", "contexts")
        )
        self._rest, self._head, self._attention = (
            1e-6 * np.array(found[name]) for name in ("rest_us", "head_us", "attention_us")
        )

    def _within(self, name: str, value: float, axis: np.ndarray) -> float:
        if value > axis[-1]:
            self.clipped.add(f"{name} above {axis[-1]:g}")
        return min(max(value, axis[0]), axis[-1])

    def rest(self, tokens: float) -> float:
        return float(np.interp(self._within("tokens", tokens, self._tokens), self._tokens, self._rest))

    def head(self, tokens: float) -> float:
        return float(np.interp(self._within("tokens", tokens, self._tokens), self._tokens, self._head))

    def attend(self, batch: float, context: float) -> float:
        context = self._within("context", context, self._contexts)
        of_batch = [np.interp(context, self._contexts, row) for row in self._attention]
        return float(np.interp(self._within("batch", batch, self._batches), self._batches, of_batch))


def known_model(name: str) -> dict[str, Any]:
    """Return the sizes of a model that has tables, by its name on the hub.

    Raises:
        UserError: it has none.
    """
    found = {each["model"]: each["shape"] for kind in gpus() for each in _file(kind)["models"]}
    if name not in found:
        raise UserError(f"--model {name}: expected a directory, or one of {', '.join(found)}" + hint(name, list(found)))
    return found[name]


def forward(gpu: Gpu, model: Mapping[str, Any], precision: str = "bfloat16", degree: int = 1) -> Forward:
    """Return the cost of a model: from its table, or from a roofline if it has none."""
    for found in _file(gpu.name)["models"]:
        same = all(model.get(name) == value for name, value in found["shape"].items())
        if same and (found["precision"], found["tensor_parallel"]) == (precision, degree):
            return Tables(gpu, model, precision, degree, found)
    return Roofline(gpu, model, precision, degree)


@dataclass
class Drafting:
    """What drafting costs on the target's GPUs. A pass proposes one token for each sequence.

    Args:
        method: eagle3, mtp, draft_model, ngram, suffix or none.
        draft: a draft model's config.json.
    """

    target: Forward
    method: str
    draft: Mapping[str, Any] | None = None
    _of_draft: Forward | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        model = dict(self.target.model)
        model["head_dim"] = model.get("head_dim") or model["hidden_size"] // model["num_attention_heads"]
        if self.method == "draft_model":
            assert self.draft is not None
            self._of_draft = forward(self.target.gpu, self.draft, self.target.precision, 1)
        elif self.method == "eagle3":
            width, hidden = model["hidden_size"], model.get("intermediate_size") or 3 * model["hidden_size"]
            self._of_draft = Roofline(
                self.target.gpu,
                {
                    **model,
                    "num_hidden_layers": 1,
                    "num_experts": 0,
                    "num_local_experts": 0,
                    # Its attention reads twice the width, and features of three layers are brought to one.
                    "intermediate_size": hidden + width + model["head_dim"] * model["num_attention_heads"] // 3,
                    "vocab_size": min(EAGLE3_VOCABULARY, model["vocab_size"]),
                },
                self.target.precision,
                self.target.degree,
            )
        elif self.method == "mtp":
            self._of_draft = Roofline(
                self.target.gpu, {**model, "num_hidden_layers": 1}, self.target.precision, self.target.degree
            )

    def seconds(self, batch: float, context: float, k: int) -> float:
        """Return the seconds in which k tokens of each sequence are proposed. The first pass also takes the tokens
        that the verification before it emitted, about k + 1 of each sequence.
        """
        if self._of_draft is None or not k:
            return 0.0
        first = self._pass(batch, context, k + 1)
        return first + (k - 1) * self._pass(batch, context, 1)

    def _pass(self, batch: float, context: float, queries: int) -> float:
        """Return the seconds of a pass, as much above its roofline as the target's own pass is above its."""
        draft = self._of_draft
        if isinstance(draft, Tables) or self.method == "draft_model":
            return draft.rest(batch * queries) + draft.head(batch) + draft.attention(batch, context, queries)
        target = self.target
        ideal = Roofline(target.gpu, target.model, target.precision, target.degree)
        tokens = batch * queries
        above = target.rest(tokens) / ideal.rest(tokens)
        share = target.head(batch) / ideal.head(batch)
        one_layer = target.attention(batch, context, queries) / target.model["num_hidden_layers"]
        return draft.rest(tokens) * above + draft.head(batch) * share + one_layer
