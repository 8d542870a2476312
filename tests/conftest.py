"""What all tests have in common: ranks of their own where they ask for them, and what a run took."""

import os
import time

import pytest
import torch
from scripts import gpu_tests
from tests.cores import share_cores
from tests.ranks.runner import POOL

share_cores()
torch.set_num_threads(
    1
)  # two workers share two cores: threads would wait for one another, spinning
OWN_PROCESSES = ("fresh", "compiler", "alone")
_SPENT = pytest.StashKey[list[dict[str, float]]]()
_BEGAN = pytest.StashKey[float]()


def pytest_runtest_setup(item):
    """Give tests that ask for it ranks of their own."""
    POOL.is_fresh = any(item.get_closest_marker(name) for name in OWN_PROCESSES)


def pytest_configure(config):
    """Begin to count."""
    config.stash[_SPENT], config.stash[_BEGAN] = [], time.monotonic()


@pytest.hookimpl(wrapper=True)
def pytest_sessionfinish(session):
    """Count this process, the programs that it has waited for, and the ranks, which it has not."""
    spent = {"tests": sum(os.times()[:4]), "ranks": POOL.processor_time()}
    POOL.close()
    told = getattr(session.config, "workeroutput", None)
    if told is not None:
        told["spent"] = spent
    session.config.stash[_SPENT].append(spent)
    return (yield)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """What a worker of xdist has spent; not known of one that has crashed."""
    node.config.stash[_SPENT].append(getattr(node, "workeroutput", {}).get("spent", {}))


def pytest_terminal_summary(terminalreporter, config):
    """Say what the run took, and whether the GPU tests have seen these sources."""
    tests, ranks = (
        sum(one.get(name, 0.0) for one in config.stash[_SPENT]) for name in ("tests", "ranks")
    )
    took = time.monotonic() - config.stash[_BEGAN]
    text = f"tests took {_minutes(took)}"
    if "SUITE_BEGAN" in os.environ:  # by make, before lint and types
        text += f", with lint and types {_minutes(time.time() - float(os.environ['SUITE_BEGAN']))}"
    terminalreporter.write_line(
        f"{text}; processor time {_minutes(tests + ranks)}, ranks {_minutes(ranks)} of it"
    )
    stale = gpu_tests.warning()
    if stale is not None:
        terminalreporter.write_line(stale)


def _minutes(seconds):
    return f"{int(seconds) // 60} min {int(seconds) % 60} s"
