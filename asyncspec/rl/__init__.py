"""Reinforcement learning: advantages, losses, the learner and the scorer of groups."""
