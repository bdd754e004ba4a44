"""Launching: how actors become processes. Nothing in asyncspec outside this package knows how many there are."""
