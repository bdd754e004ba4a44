"""Tasks: problems, their sources, and the rewards of responses to them."""
