"""Mock engine and trainer, to try a deployment without GPUs: engine.kind=mock and trainer.kind=mock.

Queues, policy lag, weight broadcasts, faults and their recovery are the real ones. Where a GPU would compute, the mock
waits as long as the GPU would take: the seconds of `mock.*` times `mock.time_scale`. The policy learns nothing.
"""
