"""What a policy acts in over several turns: environments, their processes, and the tokens of the conversation."""
