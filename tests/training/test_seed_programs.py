"""The documents' programs started as the documents say: by themselves, by torch.distributed.launch
and by torchrun.
"""

from __future__ import annotations

import os
import pathlib
import re
import shlex
import socket
import subprocess
import sys

import pytest
import torch
from tests.training.seed_programs import program

ROOT = pathlib.Path(__file__).parents[2]
# The commands of the documents after `python3`, `torchrun` being `-m torch.distributed.run`.
COMMANDS = {
    "python": "train.py",
    "launch": "-m torch.distributed.launch --master_addr ${MASTER_ADDR} --master_port "
    "${MASTER_PORT} "
    "--nproc_per_node ${GPU_PER_NODE} --nnodes ${NNODES} --node_rank ${NODE_RANK} train.py",
    "torchrun": "-m torch.distributed.run --nnodes=${NNODES} --nproc_per_node=${GPU_PER_NODE} "
    "--rdzv_id=1 --rdzv_backend=c10d "
    "--rdzv_endpoint=${MASTER_ADDR}:${MASTER_PORT} train.py",
}
STAND_INS = """
import torch
import bmtrain
from tests.training.seed_stand_ins import GPT, Classifier, first_of, labelled, load_data, offer_cuda, offer_sklearn
offer_cuda()
offer_sklearn()
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
MODEL_CENTER = program(
    STAND_INS,
    "init",
    "model = Classifier(torch.half)",
    "bmt.init_parameters(model)",
    "train_dataloader = labelled([0, 1], bmt.rank(), bmt.world_size())",
    "dev_dataloader = labelled([2], bmt.rank(), bmt.world_size())",
    "classifier_loop",
    "bmt.print_rank('labels', len(gt))",
)


def start(text: str, command: str, folder: pathlib.Path) -> str:
    """What the program prints."""
    (folder / "train.py").write_text(text, encoding="utf-8")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    values = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "NNODES": "1",
        "GPU_PER_NODE": "2",
        "NODE_RANK": "0",
    }
    filled = re.sub(r"\$\{(\w+)\}", lambda found: values[found[1]], COMMANDS[command])
    places = os.pathsep.join((str(ROOT / "src"), str(ROOT)))
    environment = {**os.environ, "PYTHONPATH": places, "OMP_NUM_THREADS": "1"}
    arguments = [sys.executable, *shlex.split(filled)]
    done = subprocess.run(
        arguments,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Error" not in done.stderr and "Traceback" not in done.stderr, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of the README's program on one rank."""
    return losses_of_readme("python", tmp_path_factory.mktemp("alone"))


def losses_of_readme(command: str, folder: pathlib.Path) -> list[float]:
    printed = start(README, command, folder)
    state = torch.load(folder / "gpt.pt", weights_only=True)
    assert not (folder / "gpt.pt.tmp").exists()
    assert state["word.weight"].shape == (40, 40) and state["word.weight"].dtype == torch.half
    assert state["transformers.1.up.weight"].shape == (128, 40)
    return [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", printed)]


@pytest.mark.parametrize("command", ["launch", "torchrun"])
def test_the_readme_program(command: str, alone: list[float], tmp_path: pathlib.Path) -> None:
    """Rank 0 alone prints; the losses are those of one process; the last save, in the background,
    is whole when it ends.
    """
    losses = losses_of_readme(command, tmp_path)
    assert len(losses) == len(alone) == 4
    assert losses == pytest.approx(alone, rel=3e-3)


@pytest.mark.parametrize("command", ["python", "torchrun"])
def test_the_model_center_program(command: str, tmp_path: pathlib.Path) -> None:
    printed = start(MODEL_CENTER, command, tmp_path)
    assert (
        len(
            re.findall(
                r"^loss: \d+\.\d+ \| lr: \S+, scale: +\d+\.0000 \| grad_norm: \S+ \|$",
                printed,
                re.MULTILINE,
            )
        )
        == 8
    )
    assert len(re.findall(r"^accuracy: \d+\.\d\d$", printed, re.MULTILINE)) == 4
    assert printed.strip().endswith("labels 12")
