"""Every test of this folder runs its ranks through tests/ranks/runner.py."""

import pytest
from tests.ranks import runner


@pytest.fixture(scope="session", autouse=True)
def _fork_server():
    """Start the fork server before the first test, so that no test is charged for the import of
    torch.
    """
    runner.fork_server()
