"""What tests of files share."""

from __future__ import annotations

import resource
from collections.abc import Iterator

import pytest


@pytest.fixture
def small_disk() -> Iterator[None]:
    """Files of this process end at 10 kB, as if the disk were full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
