"""The messages, queues, heartbeats and versioned weights that travel between actors."""
