r"""An advantage and a loss of your own. In a clone:

    asyncspec train --steps 20 rl.advantage_estimator=examples.own_algorithm.algorithm:best_of \
        rl.loss_type=examples.own_algorithm.algorithm:geometric
"""

import torch


def best_of(reward_R, group_R, length_R):
    """Return r - (the best reward of the others in the group), so that only a response that beats all others gains."""
    others_RR = reward_R.expand(len(reward_R), -1).clone().fill_diagonal_(-torch.inf)
    others_RR[group_R[:, None] != group_R] = -torch.inf
    return reward_R - others_RR.max(-1).values


def geometric(logprob_T, tokens, config):
    """Clip the logarithm of each token's ratio (GMPO, arXiv 2507.20673, token by token)."""
    log_T = logprob_T - tokens.proximal_T
    sign_T = tokens.advantage_T.sign()
    bounded_T = sign_T * torch.minimum(sign_T * log_T, sign_T * log_T.clamp(-config.clip_low, config.clip_high))
    return -tokens.advantage_T * bounded_T.exp()
