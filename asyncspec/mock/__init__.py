"""Stand-ins where GPUs would be, for deployments that are tried without any: engine.kind=mock and trainer.kind=mock.

Queues, policy lag, weight broadcasts, faults and their recovery are the real ones; what a GPU would compute is replaced
by waiting as long as it would take, by the figures of `mock.*` times `mock.time_scale`. Rewards are of random answers:
nothing is learned.
"""
