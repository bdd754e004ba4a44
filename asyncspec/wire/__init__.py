"""The messages, queues, heartbeats and versioned weights that travel between actors."""

# It stands here so that launch/estimate.py can use it without loading torch.
BUCKET_BYTES = 1 << 26  # a bucket of weights is broadcast, and gathered from several ranks, as one
