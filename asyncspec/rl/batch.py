"""Groups as padded batches, the policy's input in logprob and trainer.

Shape suffixes: G samples, L positions (prompt and response, right-padded), T response tokens of all samples.
"""

from __future__ import annotations

import numpy as np
import torch

from asyncspec.wire.messages import Arrays


def padded(prompt: list[int], arrays: Arrays, device="cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens_GL, int64, and mask_GL, True at response tokens; it selects them in the order of `arrays`."""
    lengths = arrays["lengths"]
    longest = len(prompt) + int(lengths.max())
    tokens_GL = np.zeros((len(lengths), longest), dtype=np.int64)
    tokens_GL[:, : len(prompt)] = prompt
    index_L = np.arange(longest)
    mask_GL = (index_L >= len(prompt)) & (index_L < len(prompt) + lengths[:, None])
    tokens_GL[mask_GL] = arrays["tokens"]
    return torch.from_numpy(tokens_GL).to(device), torch.from_numpy(mask_GL).to(device)


def passes(prompt: list[int], arrays: Arrays, most_tokens: int) -> list[Arrays]:
    """Split a group into parts of consecutive samples. A part has at most most_tokens when padded, unless it is a
    single sample.
    """
    lengths = arrays["lengths"]
    parts, first, longest = [], 0, 0
    for index, length in enumerate(lengths):
        longest = max(longest, len(prompt) + int(length))
        if index > first and longest * (index + 1 - first) > most_tokens:
            parts.append((first, index))
            first, longest = index, len(prompt) + int(length)
    ends = np.concatenate([[0], np.cumsum(lengths)])
    return [
        {name: array[a:b] if name == "lengths" else array[ends[a] : ends[b]] for name, array in arrays.items()}
        for a, b in [*parts, (first, len(lengths))]
    ]


def response_logprobs(logits_GLV: torch.Tensor, tokens_GL, mask_GL, temperature: float) -> torch.Tensor:
    """Return the logprobs of the response tokens at the sampling temperature, [T].

    Args:
        logits_GLV: the policy's logits after each position.
    """
    predicting_GL = mask_GL[:, 1:]  # the position before a token predicts it
    logprobs_TV = (logits_GLV[:, :-1][predicting_GL] / temperature).log_softmax(-1)
    return logprobs_TV.gather(-1, tokens_GL[:, 1:][predicting_GL].unsqueeze(-1)).squeeze(-1)
