"""What travels between actors: messages, queues, heartbeats and versioned weights."""
