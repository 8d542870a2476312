"""torchrun is killed: its ranks end, wherever they are."""

import os
import pathlib
import signal
import subprocess
import sys

import psutil
import pytest
from tests.waiting import wait_for

ROOT = pathlib.Path(__file__).parents[2]
PROGRAM = """
import ctypes, os, pathlib, sys, time
import torch, bmtrain as bmt
where, mark = sys.argv[1:]
def arrive(): pathlib.Path(mark, str(os.getpid())).write_text("")
if where == "before":
    arrive()
    while pathlib.Path(mark, "wait").exists():
        time.sleep(0.05)
bmt.init_distributed(device="cpu")
if where == "training":
    from model_center.training.stop import StopRequest
    stop = StopRequest(patience=20)
arrive()
if where == "training":
    while not stop.agreed():
        time.sleep(0.05)
    time.sleep(3)  # longer than torchrun's end is noticed in
    pathlib.Path(mark, f"saved {bmt.rank()}").write_text("")
    sys.exit()
if bmt.rank() == 0:
    ctypes.CDLL(None).sleep(600)
bmt.synchronize()
"""


@pytest.mark.long
@pytest.mark.parametrize("where", ["before", "collective", "training"])
def test_ranks_end_with_their_launcher(where, tmp_path):
    """Killed before they join the run, and while a rank waits in a collective, another in
    C. A training run saves first."""
    program, mark = tmp_path / "program.py", tmp_path / "marks"
    program.write_text(PROGRAM, "utf-8")
    mark.mkdir()
    (mark / "wait").write_text("")
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "src"),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    with subprocess.Popen(
        [*torchrun, str(program), where, str(mark)],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as launcher:
        wait_for(lambda: len([*mark.iterdir()]) == 3, "two ranks")
        ranks = [psutil.Process(int(path.name)) for path in mark.iterdir() if path.name != "wait"]
        assert all(rank.ppid() == launcher.pid for rank in ranks)
        launcher.send_signal(signal.SIGKILL)
        launcher.wait(10)
    (mark / "wait").unlink()
    try:
        _, alive = psutil.wait_procs(ranks, timeout=20)
        assert not alive
        saved = {path.name for path in mark.iterdir() if path.name.startswith("saved")}
        assert saved == ({"saved 0", "saved 1"} if where == "training" else set())
    finally:
        for rank in ranks:
            if rank.is_running():
                rank.kill()
