"""How the many processes of the tests share a machine's cores."""

import contextlib
import os


def share_cores():
    """Let this process, and all that it starts, run in batches.

    A thread of Gloo that wakes up would else push aside the one that wakes it, which holds the lock
    that the former polls for: milliseconds for each message, and ten times the processor time,
    where ranks share cores.
    """
    with contextlib.suppress(OSError):  # not everywhere allowed: tests are slower there
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
