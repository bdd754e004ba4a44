"""Drafts with weights: what they learn from, how they are trained, offline and while the policy moves."""
