"""The documents' programs started as the documents say: by themselves, by torch.distributed.launch
and by torchrun.
"""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.training.seed_programs import program

ROOT = Path(__file__).parents[2]
STAND_INS = """
import torch
import bmtrain
from tests.training.seed_stand_ins import GPT, first_of, load_data, offer_cuda
offer_cuda()
range = first_of(4)
"""
README = program(
    STAND_INS,
    "gpt_model",
    "gpt_optimizer",
    "gpt_loop",
    places={
        "load data for each rank": "enc_input, enc_length, targets = load_data(iteration)",
        "save checkpoint or print logs": "bmtrain.print_rank('loss', global_loss); bmtrain.save(model, 'gpt.pt', "
        "non_blocking=True)",
    },
)
# The commands of the documents after `python3`, torchrun being `-m torch.distributed.run`.
LAUNCH = "-m torch.distributed.launch --master_addr 127.0.0.1 --master_port {} --nnodes 1 "
TORCHRUN = "-m torch.distributed.run --rdzv_id=1 --rdzv_backend=c10d --nnodes=1 "
COMMANDS = {
    "python": "train.py",
    "launch": LAUNCH + "--nproc_per_node 2 --node_rank 0 train.py",
    "torchrun": TORCHRUN + "--nproc_per_node=2 --rdzv_endpoint=127.0.0.1:{} train.py",
}


def losses(command, folder):
    """What the README's program prints, started so; the last save is whole."""
    folder.mkdir()
    (folder / "train.py").write_text(README, "utf-8")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    places = os.pathsep.join((str(ROOT / "src"), str(ROOT)))
    environment = {**os.environ, "PYTHONPATH": places, "OMP_NUM_THREADS": "1"}
    words = [sys.executable, *COMMANDS[command].format(port).split()]
    how = {"cwd": folder, "env": environment, "capture_output": True, "text": True}
    done = subprocess.run(words, timeout=300, check=False, **how)
    assert done.returncode == 0, done.stderr
    assert "Error" not in done.stderr and "Traceback" not in done.stderr, done.stderr
    state = torch.load(folder / "gpt.pt", weights_only=True)
    assert not (folder / "gpt.pt.tmp").exists()
    assert state["word.weight"].shape == (40, 40) and state["word.weight"].dtype == torch.half
    assert state["transformers.1.up.weight"].shape == (128, 40)
    return [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", done.stdout)]


@pytest.mark.long
def test_the_readme_program(tmp_path):
    """Rank 0 alone prints; the losses are those of one process; the last save, in the background,
    is whole when it ends.
    """
    alone, *others = (losses(command, tmp_path / command) for command in COMMANDS)
    assert len(alone) == 4
    for found in others:
        assert found == pytest.approx(alone, rel=3e-3)
