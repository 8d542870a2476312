"""What `import bmtrain` costs, and that it does nothing else."""

import os
import subprocess
import sys

import pytest
from tests.arch.source import ROOT

SHARE = 0.16  # of what `import torch` takes: 0.2 s where that takes 1.3, on any processor

MEASURE = """
import gc, time
gc.disable()  # one collection takes a third of the time of our import, and falls into it or into torch's by chance
start = time.process_time()  # waiting for a core that other processes use is not our cost
import torch
between = time.process_time()
import bmtrain
print((time.process_time() - between) / (between - start))
"""

INSPECT = """
import torch
threads = torch.get_num_threads()
import bmtrain
print(torch.distributed.is_initialized(), torch.cuda.is_initialized(), torch.get_num_threads() == threads)
"""


def in_a_fresh_process(program):
    """What `program` prints when it is run by this interpreter alone."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # programs compile their modules once
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.mark.long
def test_import_is_cheap():
    """A sixth of the processor time of `import torch` on top of it; the least of three, as caches
    are shared too.
    """
    share = min(float(in_a_fresh_process(MEASURE)) for _ in range(3))
    assert share <= SHARE, (
        f"import bmtrain takes {share:.0%} of the time that import torch takes, expected "
        f"at most {SHARE:.0%}"
    )


def test_import_does_nothing():
    """No process group, no CUDA context, no change of the number of threads."""
    assert in_a_fresh_process(INSPECT) == "False False True"
