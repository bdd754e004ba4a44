"""What a broken NCCL group may do to its process. torch reads that from the environment when it makes the group.

torchrun has torch abort the process. That suits the ranks of a sharded model, which cannot go on without each other.
The members of a broadcast group can, so a failed broadcast may end no more than its communicator.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
ENDS_ALONE = "2"  # torch's CleanUpOnly: abort the communicator, and spare the process
_making = threading.Lock()  # a process joins the groups of policy and draft in two threads


@contextmanager
def ends_alone() -> Iterator[None]:
    """Make an NCCL group in here, and its failures end only its communicator. Groups made elsewhere keep what the
    environment says.
    """
    with _making:
        before = os.environ.get(HANDLING)
        os.environ[HANDLING] = ENDS_ALONE
        try:
            yield
        finally:
            if before is None:
                del os.environ[HANDLING]
            else:
                os.environ[HANDLING] = before
