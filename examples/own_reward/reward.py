"""A reward of your own: a right answer earns 1, and a short way to it earns up to half a point more."""


def short_and_right(prompt: str, response: str, answer: str) -> float:
    """Reward of one rollout. It may be any finite number."""
    right = response.rpartition("#")[2].strip() == answer
    return 1.0 + 0.5 / (1 + len(response) / 20) if right else 0.0
