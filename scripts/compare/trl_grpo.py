#!/usr/bin/env python3
"""Run TRL's GRPOTrainer on the default job. Usage: trl_grpo.py JOB.json, with the fields of `Job`.

Writes metrics.jsonl to the job's directory, in the fields of a run's: a row for each step, whose seconds leave
evaluations out, and then the held-out score of the version that the step made, if it was evaluated.

In vLLM's engine heads are widened as in models/widen.py, since its attention on CPUs has no narrow ones. TRL loads new
weights into vLLM tensor by tensor, which fails on CPUs, whose kernels have packed copies; here vLLM reloads them all.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tempfile
import time
import uuid
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Job:
    """What TRL is to run.

    policy: a Hugging Face directory. train, held_out: JSONL with prompt and answer; `train` is in the run's order.
    engine: "transformers" or "vllm".
    target: held-out accuracy at which to stop, as the mean of two evaluations in a row.
    rows_per_pass: rollouts of a forward pass; gradients accumulate over the passes of a step.
    """

    directory: str
    policy: str
    train: str
    held_out: str
    engine: str
    threads: int
    steps: int
    eval_every: int
    target: float
    seed: int
    groups_per_step: int
    group_size: int
    max_prompt_tokens: int
    max_response_tokens: int
    temperature: float
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    max_grad_norm: float
    warmup_steps: int
    clip_low: float
    clip_high: float
    correction_high: float
    rows_per_pass: int


def main() -> None:
    job = Job(**json.loads(Path(sys.argv[1]).read_text()))
    os.environ |= {
        "OMP_NUM_THREADS": str(job.threads),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    from asyncspec.engine import vllm_process

    vllm_process.prepare(job.threads)
    import torch
    import transformers

    torch.set_num_threads(job.threads)
    policy = transformers.AutoModelForCausalLM.from_pretrained(job.policy, dtype=torch.float32)
    if job.engine == "vllm":
        _prepare_vllm(job, policy)
    import datasets
    import trl

    # Hashing fails on classes of Python 3.11. A value of its own for each call finds nothing in the cache.
    datasets.fingerprint.Hasher.hash = classmethod(lambda cls, value: uuid.uuid4().hex)
    from asyncspec.tasks.sums import exact_match

    def reward(prompts, completions, answer, **_) -> list[float]:
        return [exact_match(*texts) for texts in zip(prompts, completions, answer)]

    batch = job.groups_per_step * job.group_size
    on_vllm = {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_max_model_length": job.max_prompt_tokens + job.max_response_tokens,
        "vllm_importance_sampling_mode": "token_truncate",
        "vllm_importance_sampling_clip_max": job.correction_high,
    }
    arguments = trl.GRPOConfig(
        output_dir=job.directory,
        seed=job.seed,
        max_steps=job.steps,
        per_device_train_batch_size=job.rows_per_pass,
        gradient_accumulation_steps=batch // job.rows_per_pass,
        num_generations=job.group_size,
        max_completion_length=job.max_response_tokens,
        temperature=job.temperature,
        shuffle_dataset=False,
        learning_rate=job.lr,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=job.warmup_steps,
        adam_beta1=job.beta1,
        adam_beta2=job.beta2,
        adam_epsilon=job.eps,
        weight_decay=job.weight_decay,
        max_grad_norm=job.max_grad_norm,
        epsilon=job.clip_low,
        epsilon_high=job.clip_high,
        loss_type="dapo",
        beta=0.0,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,  # it would save memory, and cost a second forward pass
        eval_strategy="steps",
        eval_steps=job.eval_every,
        eval_on_start=True,
        per_device_eval_batch_size=256,
        num_generations_eval=1,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **(on_vllm if job.engine == "vllm" else {}),
    )

    class Clock(transformers.TrainerCallback):
        """Writes a row for each step, and stops once two evaluations in a row have the target as their mean."""

        def __init__(self) -> None:
            self.file = (Path(job.directory) / "metrics.jsonl").open("w")
            self.mark, self.scores = 0.0, []
            self.row = {}

        def on_step_begin(self, args, state, control, **_):
            self.mark = self.mark or time.perf_counter()

        def on_step_end(self, args, state, control, **_):
            now = time.perf_counter()
            self.row = {"policy_version": state.global_step, "time/step": now - self.mark}
            self.mark = now

        def on_log(self, args, state, control, logs=None, **_):
            if "eval_reward" in logs:
                self.write({"eval/policy_version": state.global_step, "eval/score": logs["eval_reward"]})
                self.scores.append(logs["eval_reward"])
                control.should_training_stop |= len(self.scores) > 1 and sum(self.scores[-2:]) / 2 >= job.target
                self.mark = time.perf_counter() if self.mark else 0.0
            elif "reward" in logs:
                lengths = {"tokens/response_mean": logs["completions/mean_length"]}
                self.write(self.row | {"reward/mean": logs["reward"]} | lengths)

        def write(self, row: dict) -> None:
            self.file.write(json.dumps(row) + "\n")
            self.file.flush()

    trl.GRPOTrainer(
        model=policy,
        processing_class=transformers.AutoTokenizer.from_pretrained(job.policy, padding_side="left"),
        reward_funcs=reward,
        args=arguments,
        train_dataset=datasets.load_dataset("json", data_files=job.train, split="train"),
        eval_dataset=datasets.load_dataset("json", data_files=job.held_out, split="train"),
        callbacks=[Clock()],
    ).train()


def _prepare_vllm(job: Job, policy) -> None:
    """Have vLLM load the policy with wider heads, at the start and at each update."""
    import torch
    import vllm
    from trl.generation import vllm_generation
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    from asyncspec.engine import vllm_process
    from asyncspec.models.widen import widened, widened_tensors

    head_dim = policy.config.head_dim
    if (factor := vllm_process.head_factor(head_dim)) > 1:
        policy.name_or_path = policy.config._name_or_path = tempfile.mkdtemp()
        widened(Path(job.policy), Path(policy.name_or_path), factor)
    build = vllm.LLM.__init__

    def in_float32(self, *args, **kwargs) -> None:
        build(self, *args, **(kwargs | {"dtype": "float32"}))
        torch.set_num_threads(job.threads)

    def sync_weights(self) -> None:
        engine = self.llm.llm_engine.model_executor.driver_worker.model_runner
        initialize_layerwise_reload(engine.model)
        tensors = {name: tensor.detach() for name, tensor in self._iter_named_params()}
        engine.model.load_weights(widened_tensors(tensors, head_dim, factor).items())
        finalize_layerwise_reload(engine.model, engine.model_config)
        vllm_process.pack_heads(engine.model)
        self.llm.reset_prefix_cache()

    vllm.LLM.__init__ = in_float32
    vllm_generation.VLLMGeneration.sync_weights = sync_weights


if __name__ == "__main__":
    main()
