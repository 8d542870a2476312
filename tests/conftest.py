"""What all tests have in common."""

from __future__ import annotations

from tests.cores import share_cores

share_cores()
