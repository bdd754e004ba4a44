"""Tasks: problems, where they come from, and how responses to them are rewarded."""
