"""What a policy acts in over several turns: environments, the processes that run them, and the conversation's tokens."""
