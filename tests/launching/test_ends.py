"""How a rank's process ends."""

import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from tests.children import environment

ROOT = Path(__file__).parents[2]

STORE = """
    import sys
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    print(store.port, flush=True)
    sys.stdin.read()
"""

# What this module leaves behind makes the interpreter's end long: a thread that comes back from the
# store then would abort it.
RANK = """
    import sys, time
    import bmtrain as bmt
    from bmtrain.runtime import watchdog

    class Slow:
        def __del__(self, sleep=time.sleep):
            sleep(2)

    watchdog._WORDS_S = 0.1
    bmt.init_distributed(device="cpu")
    sys.modules["slow"] = Slow()
    print("ready", flush=True)
    sys.stdin.readline()
"""


def start(program, **variables):
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        env=environment(**variables),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def first_line(process):
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.long
def test_a_store_that_stands_still_at_the_end():
    """Ranks leave while the store's host answers nobody, for a while: they end as they should."""
    host = start(STORE)
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    place |= {"MASTER_PORT": first_line(host), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    ranks = [start(RANK, RANK=str(rank), LOCAL_RANK=str(rank), **place) for rank in range(2)]
    try:
        assert [first_line(rank) for rank in ranks] == ["ready", "ready"]
        host.send_signal(signal.SIGSTOP)
        for rank in ranks:
            assert rank.stdin is not None
            rank.stdin.write("\n")
            rank.stdin.flush()
        time.sleep(1.0)
        host.send_signal(signal.SIGCONT)
        for rank in ranks:
            _, errors = rank.communicate(timeout=60)
            assert rank.returncode == 0, errors
    finally:
        for process in (host, *ranks):
            process.kill()
            process.communicate()
