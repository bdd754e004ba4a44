"""Play a user: for each form of data and each form of reward, write the files, start a run, and count the seconds until
its first step is trained.

    python scripts/first_step.py
    python scripts/first_step.py --policy smollm2/model --only parquet --only reasoning_gym

Forms whose packages are not installed are left out: `pip install -e ".[tasks]"` brings them.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow
from pyarrow import parquet

from asyncspec.config import resolve_path

SUMS = [(a, b) for a in range(2, 10) for b in range(2, 10)]
TEXTS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in SUMS]
MESSAGES = [{"prompt": [{"role": "user", "content": row["prompt"]}], "answer": row["answer"]} for row in TEXTS]
VERL = [
    {
        "data_source": "sums",
        "prompt": row["prompt"],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": row["answer"]},
        "extra_info": {"index": i},
    }
    for i, row in enumerate(MESSAGES)
]
GYM = [
    {
        "question": row["prompt"][0]["content"],
        "prompt": row["prompt"],
        "answer": row["answer"],
        "metadata": {"source_dataset": "chain_sum"},
    }
    for row in MESSAGES
]
CODE = [{"prompt": row["prompt"], "answer": "assert True"} for row in TEXTS]
REWARDS = """
def right(response, answer):
    return float(response.rpartition("#")[2].strip() == answer)

def of_three(prompt, response, answer):
    return right(response, answer)

async def of_three_async(prompt, response, answer):
    return right(response, answer)

def of_verl(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": right(solution_str, ground_truth)}

def of_trl(completions, answer, **columns):
    texts = [each if isinstance(each, str) else each[0]["content"] for each in completions]
    return [right(text, own) for text, own in zip(texts, answer)]
"""
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"  # the shipped policy has none


def jsonl(file: Path, rows: Sequence[dict]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def as_csv(file: Path, rows: Sequence[dict]) -> None:
    with open(file, "w", newline="") as opened:
        writer = csv.DictWriter(opened, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def as_parquet(file: Path, rows: Sequence[dict]) -> None:
    parquet.write_table(pyarrow.Table.from_pylist(list(rows)), file)


def cases() -> dict[str, tuple[str, Callable[[Path, Sequence[dict]], None], list[dict], str]]:
    """Return name -> (file, its writer, its rows, the reward). Each form of data and of reward is there once."""
    found = {
        "JSONL, text; a function of three texts": ("a.jsonl", jsonl, TEXTS, "rewards:of_three"),
        "JSONL, messages; an async function": ("a.jsonl", jsonl, MESSAGES, "rewards:of_three_async"),
        "CSV; numeric": ("a.csv", as_csv, TEXTS, "numeric"),
        "Parquet; TRL's form": ("a.parquet", as_parquet, MESSAGES, "rewards:of_trl"),
        "verl's layout and form": ("a.parquet", as_parquet, VERL, "rewards:of_verl"),
        "JSONL; two with weights, exact and format": ("a.jsonl", jsonl, TEXTS, "exact,format"),
        "JSONL; code": ("a.jsonl", jsonl, CODE, "code"),
        "JSONL; math_verify": ("a.jsonl", jsonl, TEXTS, "math_verify"),
        "JSONL, of reasoning-gym; reasoning_gym": ("a.jsonl", jsonl, GYM, "reasoning_gym"),
    }
    return {
        name: case
        for name, case in found.items()
        if case[3] not in ("math_verify", "reasoning_gym") or importlib.util.find_spec(case[3])
    }


def seconds_to_first_step(folder: Path, policy: Path, case, extra: Sequence[str]) -> float:
    """Write the files of a case and run it. Raises RuntimeError if the run fails."""
    began = time.monotonic()
    file, write, rows, reward = case
    write(folder / file, rows)
    (folder / "rewards.py").write_text(REWARDS)
    command = [sys.executable, "-m", "asyncspec", "train", "--steps", "2", "--run-dir", str(folder / "run")]
    command += [f"model.path={policy}", f"data.train_file={folder / file}", f"data.reward={reward}"]
    command += [
        "speculation.method=ngram",
        "rl.groups_per_step=4",
        "rl.group_size=4",
        "sampling.max_response_tokens=32",
    ]
    if reward == "exact,format":
        command += ["data.reward_weights=1,0.2", r"data.reward_pattern=.*#\d+"]
    run = subprocess.Popen([*command, *extra], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert run.stdout is not None
    output = ""
    for line in run.stdout:
        output += line
        if line.startswith("step "):
            break
    seconds = time.monotonic() - began
    output += run.communicate()[0]
    if run.returncode:
        raise RuntimeError(f"exit code {run.returncode}\n{output}")
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="asset:tiny/policy", help="directory of the policy")
    parser.add_argument(
        "--only", action="append", default=[], metavar="TEXT", help="only forms with this in their name"
    )
    parser.add_argument("overrides", nargs="*", metavar="field=value", help="fields of all runs")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        policy = Path(directory) / "policy"
        shutil.copytree(resolve_path(given.policy), policy)
        if not (policy / "chat_template.jinja").exists():
            (policy / "chat_template.jinja").write_text(TEMPLATE)
        print("| data; reward | seconds to the first step |\n|---|---:|")
        for number, (name, case) in enumerate(cases().items()):
            if not given.only or any(text.lower() in name.lower() for text in given.only):
                folder = Path(directory) / str(number)
                folder.mkdir()
                print(f"| {name} | {seconds_to_first_step(folder, policy, case, given.overrides):.0f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
