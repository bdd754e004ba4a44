"""RL: tasks and rewards, advantages, losses."""
