"""`asyncspec data show`: what the policy and the reward get of a run's data, and what they make of it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing

from asyncspec.config import Config, ConfigError, resolve_path
from asyncspec.models import tokenizer as tokenizers
from asyncspec.tasks.data import load_problems, told_left_out
from asyncspec.tasks.problem import Problem


def show(config: Config, count: int, samples: int, held_out: bool, tell: Callable[[str], None] = print) -> int:
    """Print the first problems of a run, in its order. Return the exit code.

    Args:
        count: how many.
        samples: responses that the policy gives to each, with their rewards.
        held_out: print those that are held out, not those for training.

    Raises:
        ConfigError: the data cannot be read, a prompt cannot be rendered or is too long, or the reward fails.
    """
    try:
        found = load_problems(config)
        tokenizer = tokenizers.load(resolve_path(config.model.path))
    except ValueError as error:
        raise ConfigError(str(error)) from None
    source = config.data.train_file or f"the built-in task {config.data.task}"
    training = found.training[:: config.rl.tries]  # without those that may replace them
    counts = Counter(problem.eval_set for problem in found.held_out)
    sets = f" ({', '.join(f'{name} {count}' for name, count in counts.items())})" if len(counts) > 1 else ""
    tell(f"{source}: {len(training)} prompts in {config.steps} steps, {len(found.held_out)} held out{sets}")
    if found.left_out:
        tell(told_left_out(config, found.left_out))
    problems = (found.held_out if held_out else training)[:count]
    prompts = [tokenizers.encode_prompt(tokenizer, problem.prompt) for problem in problems]
    answers = _answers(config, tokenizer, problems, prompts, samples) if samples and problems else [()] * len(problems)
    for number, (problem, tokens, answered) in enumerate(zip(problems, prompts, answers), 1):
        tell(f"\nprompt {number}, {len(tokens)} of at most {config.engine.max_prompt_tokens} tokens")
        tell(problem.prompt)
        tell(
            "tokens: "
            + " ".join(f"{token}:{tokenizer.decode([token], skip_special_tokens=False)!r}" for token in tokens)
        )
        tell(f"answer: {problem.answer!r}")
        if problem.row:
            tell(f"the reward also gets: {problem.row}")
        for response, length, reward in answered:
            rewarded = "no reward" if reward is None else f"reward {reward:g}"
            tell(f"response of {length} tokens, {rewarded}: {response!r}")
    return 0


def _answers(
    config: Config, tokenizer, problems: Sequence[Problem], prompts: Sequence[Sequence[int]], samples: int
) -> list[list[tuple[str, int, float | None]]]:
    """Return (response, its number of tokens, its reward or None if none applies) of all samples of each problem.

    Raises:
        ConfigError: see `show`.
    """
    from asyncspec.actors.engines import make_engine
    from asyncspec.engine.protocol import Request
    from asyncspec.launch.roles import devices
    from asyncspec.loading import use_threads
    from asyncspec.tasks.rewarder import Rewarder, RewardError

    data, limit, longest = config.data, config.engine.max_prompt_tokens, max(map(len, prompts))
    if longest > limit:
        raise ConfigError(
            f"engine.max_prompt_tokens={limit}: a prompt has {longest} tokens; nearest valid choice: "
            f"engine.max_prompt_tokens={longest}"
        )
    rewarder = Rewarder.of(config, most_failures=1.0)
    use_threads(config.engine.threads)
    with closing(rewarder):
        try:
            rewarder.load()
            engine = make_engine(config, devices(config.deployment.device, ["generator"])[0])
            for i, prompt in enumerate(prompts):
                seeds = range(samples * i, samples * (i + 1))
                engine.submit(Request(i, prompt, seeds, config.sampling.max_response_tokens))
            completions = [[] for _ in problems]
            while engine.live or engine.waiting:
                for completion in engine.poll():
                    completions[completion.request_id].append(completion)
            answers = []
            for problem, done in zip(problems, completions):
                done.sort(key=lambda completion: completion.sample)
                tokens = [completion.tokens.tolist() for completion in done]
                texts = [
                    tokenizers.response_text(tokenizer, own, completion.truncated, data.reward_special_tokens)
                    for own, completion in zip(tokens, done)
                ]
                rewarder.submit(0, problem.prompt, texts, problem.answer, problem.row)
                while not (found := rewarder.found()):
                    time.sleep(0.01)
                answers.append(list(zip(texts, map(len, tokens), found[0][1])))
        except (RewardError, ValueError) as error:
            raise ConfigError(str(error)) from None
    if rewarder.failed:
        raise ConfigError(
            f"data.reward={data.reward}: failed for {rewarder.failed} of {rewarder.called} responses; the first "
            f"{rewarder.first_failure}; expected a finite number"
        )
    return answers
