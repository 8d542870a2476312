"""Exit codes of a run's processes; users have them in docs/site/en/reference/trouble.md."""

from __future__ import annotations

from typing import Final

FAILED: Final = 1  # an exception
REQUEUE: Final = 75  # stopped with a checkpoint by SIGUSR1: start it again (EX_TEMPFAIL)
HUNG: Final = 81  # the watchdog: no progress for its limit
PARTED: Final = 82  # RanksPartedError: ranks did different things, or one is missing
LAUNCHER_LOST: Final = 83  # the torchrun that started this rank has ended
OUT_OF_PATIENCE: Final = 84  # asked to stop, and the step or its checkpoint took too long
INTERRUPTED: Final = 130  # Ctrl-C (the second one where the first asks for a stop)
