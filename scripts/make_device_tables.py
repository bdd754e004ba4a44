#!/usr/bin/env python3
"""Write asyncspec/simulate/tables/*.json: the times of a decoding step of some models on some GPUs, as measured by the
authors of aiconfigurator-core. Run it in an environment with `pip install aiconfigurator-core==0.12.0`.

For each model, precision and tensor parallel degree there are three tables, in microseconds:

    rest_us[t]          a pass over tokens[t] tokens, without attention and head
    head_us[t]          the head for tokens[t] tokens
    attention_us[b][c]  attention of one token of each of batches[b] sequences to contexts[c] positions

`rest_us` is made to rise with tokens: a few measured kernels are slower with fewer tokens. A model that has no table
for an engine takes the next engine's. `measured` is the share of a step's time that the package interpolates from
measurements; the rest comes from its formulas.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
import yaml

PACKAGE, VERSION = "aiconfigurator-core", "0.12.0"
GPUS = {"GB200": "gb200", "B200": "b200_sxm", "H200": "h200_sxm", "H100": "h100_sxm", "A100": "a100_sxm"}
ENGINES = ("vllm", "sglang", "trtllm")
PRECISIONS = {
    "bfloat16": {"gemm_quant_mode": "bfloat16", "moe_quant_mode": "bfloat16"},
    "fp8": {"gemm_quant_mode": "fp8", "moe_quant_mode": "fp8"},
}
MODELS = {  # model -> tensor parallel degrees
    "Qwen/Qwen3-0.6B": (1,),
    "Qwen/Qwen3-1.7B": (1,),
    "Qwen/Qwen3-8B": (1, 2, 4),
    "Qwen/Qwen3-32B": (1, 2, 4, 8),
    "meta-llama/Meta-Llama-3.1-70B": (2, 4, 8),
    "Qwen/Qwen3-30B-A3B": (1, 2, 4, 8),
    "Qwen/Qwen3-235B-A22B": (4, 8, 16),
}
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
CONTEXTS = (256, 1024, 2048, 4096, 8192, 16384, 32768)
SHAPE = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
)
DIGITS = 4


def rounded(values) -> list:
    return [rounded(each) if np.ndim(each) else float(f"{1000 * each:.{DIGITS}g}") for each in values]


def tables_of(model: str, system: str, engine: str, precision: str, degree: int, experts: bool) -> dict | None:
    """Return the tables of one configuration, or None if a measurement that it needs is missing."""
    from aiconfigurator_core.sdk.engine import EngineHandle
    from aiconfigurator_core.sdk.errors import PerfDataNotAvailableError

    for split in ((degree, 1), (1, degree)) if experts and degree > 1 else ((1, 1),):
        try:
            handle = EngineHandle.compile(
                model,
                system,
                engine,
                tp_size=degree,
                moe_tp_size=split[0],
                moe_ep_size=split[1],
                **PRECISIONS[precision],
            )
            ops = handle.decode_step_per_op(64, 4000, 2)
            names = [name for name, *_ in ops]
            attention, head = ([i for i, name in enumerate(names) if part in name] for part in ("attention", "logits"))
            rest = [i for i in range(len(names)) if i not in {*attention, *head}]

            def ms(indices: list[int], batch: int, context: int) -> float:
                return sum(op[1] for op in handle.evaluate_generation_ops(indices, batch_size=batch, s=context))

            found = {
                "rest_us": rounded(np.maximum.accumulate([ms(rest, tokens, 1024) for tokens in TOKENS])),
                "head_us": rounded(np.maximum.accumulate([ms(head, tokens, 1024) for tokens in TOKENS])),
                "attention_us": rounded([[ms(attention, batch, context) for context in CONTEXTS] for batch in BATCHES]),
                "expert_parallel": split[1],
                "measured": round(sum(op[1] for op in ops if op[3] == "silicon") / sum(op[1] for op in ops), 2),
            }
        except (PerfDataNotAvailableError, ValueError, KeyError) as error:
            print(f"  {engine} {precision} TP{degree} {split}: {str(error)[:110]}", file=sys.stderr)
            continue
        return found
    return None


def main() -> None:
    import aiconfigurator_core

    if version(PACKAGE) != VERSION:
        raise SystemExit(f"{PACKAGE} {version(PACKAGE)}: expected {VERSION}")
    package = Path(aiconfigurator_core.__file__).parent
    folder = Path(__file__).parents[1] / "asyncspec" / "simulate" / "tables"
    folder.mkdir(exist_ok=True)
    for gpu, system in GPUS.items():
        facts = yaml.safe_load((package / "systems" / f"{system}.yaml").read_text())
        models = []
        for model, degrees in MODELS.items():
            config = json.loads((package / "model_configs" / f"{model.replace('/', '--')}_config.json").read_text())
            shape = {name: config[name] for name in SHAPE if config.get(name)}
            for precision in PRECISIONS:
                for degree in degrees:
                    for engine in ENGINES:
                        found = tables_of(model, system, engine, precision, degree, "num_experts" in shape)
                        if found is not None:
                            about = {
                                "model": model,
                                "precision": precision,
                                "tensor_parallel": degree,
                                "engine": engine,
                            }
                            models.append({**about, **found, "shape": shape})
                            break
                    else:
                        print(f"{gpu} {model} {precision} TP{degree}: no table", file=sys.stderr)
        content = {
            "source": f"{PACKAGE} {VERSION}",
            "license": "Apache-2.0, Copyright NVIDIA CORPORATION & AFFILIATES",
            "gpu": {
                "memory_bytes_s": float(facts["gpu"]["mem_bw"]),
                "memory_bytes": float(facts["gpu"]["mem_capacity"]),
                "flops": float(facts["gpu"]["bfloat16_tc_flops"]),
                "flops_fp8": float(facts["gpu"].get("fp8_tc_flops", 0)),
                "gpus_per_node": facts["node"]["num_gpus_per_node"],
                "nvlink_gpus": facts["node"].get("num_gpus_per_rack", facts["node"]["num_gpus_per_node"]),
                "node_bytes_s": float(facts["node"]["intra_node_bw"]),
                "network_bytes_s": float(facts["node"].get("inter_rack_bw", facts["node"]["inter_node_bw"])),
            },
            "tokens": list(TOKENS),
            "batches": list(BATCHES),
            "contexts": list(CONTEXTS),
            "models": models,
        }
        text = json.dumps(content)
        for before, after in ((', {"model"', ',\n{"model"'), ('"models": [', '"models": [\n')):
            text = text.replace(before, after)
        (folder / f"{gpu.lower()}.json").write_text(text + "\n")
        print(f"{gpu}: {len(models)} configurations, {len(text) / 1024:.0f} KB")


if __name__ == "__main__":
    main()
