"""ModelCenter's programs, unchanged, on tiny models: equal losses on one rank and on two."""

from __future__ import annotations

import os
import pathlib
import re
import runpy
import sys
from typing import Any

import numpy as np
import pytest
import torch
from tests.ranks.runner import run_ranks
from tests.training import task_programs
from tests.training.lm_programs import DATA, tiny
from tests.training.seed_stand_ins import offer_cuda

from model_center.dataset.squad import SQuAD_Dataset
from model_center.tokenizer import T5Tokenizer
from model_center.tools.indexed_dataset import make_builder

T5: Any = T5Tokenizer.from_pretrained(DATA / "tokenizers" / "t5")


def main(path: str, output: str, arguments: list[str]) -> None:
    """On a rank: the program as it is, on a machine without GPUs; rank 0's lines go to a file."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    offer_cuda()
    torch.cuda.memory_summary = lambda *_, **__: "no GPU"
    os.chdir(pathlib.Path(path).parent)
    sys.argv = ["train.py", *arguments]
    with open(f"{output}.{os.environ['RANK']}", "w", encoding="utf-8") as lines:
        sys.stdout = lines
        runpy.run_path(path, run_name="__main__")


def printed(text: str, folder: pathlib.Path, ranks: int, *arguments: object, batch: int = 8) -> str:
    """What rank 0 prints on so many ranks; `batch` rows on all together."""
    (folder / "train.py").write_text(task_programs.COMMON + text, encoding="utf-8")
    options = [
        *map(str, arguments),
        "--batch-size",
        str(batch // ranks),
        *[
            "--lr",
            "1e-3",
            "--lr-decay-style",
            "constant",
            "--warmup-iters",
            "2",
            "--loss-scale",
            "128",
        ],
    ]
    places = str(folder / "train.py"), str(folder / f"{ranks}.log")
    run_ranks(main, ranks, *places, options, join=False, timeout=240)
    return (folder / f"{ranks}.log.0").read_text(encoding="utf-8")


def losses(lines: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^train .*\| loss: (\S+) ", lines, re.MULTILINE)]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The folder that holds `down_data`, and the tiny models."""
    folder = tmp_path_factory.mktemp("base")
    (folder / "down_data").symlink_to(DATA)
    return folder


LENGTHS = "--max-encoder-length 96 --max-decoder-length"
PROGRAMS = {
    "bert": (task_programs.BERT, "96"),
    "gpt2": (task_programs.GPT2, "96"),
    "gptj": (task_programs.GPTJ, "96"),
    "llama": (task_programs.LLAMA, "96"),
    "t5": (task_programs.T5, "2"),
    "t5-v1_1": (task_programs.T5, "2"),
}


@pytest.mark.parametrize(
    ("family", "task", "rows"),
    [
        ("bert", "COPA", 8),
        ("gpt2", "COPA", 8),
        ("gptj", "RTE", 8),
        ("llama", "CB", 6),
        ("t5", "WiC", 8),
        ("t5-v1_1", "MultiRC", 12),
    ],
)
def test_fine_tuning(
    family: str, task: str, rows: int, base: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """Every dev row is judged once."""
    text, decoder_length = PROGRAMS[family]
    where = ["--model-config", tiny(family, base), "--base-path", base, "--dataset", task]
    lengths = [*LENGTHS.split(), decoder_length]
    one, two = (printed(text, tmp_path, ranks, *where, *lengths) for ranks in (1, 2))
    assert len(losses(one)) >= 2
    assert losses(two) == pytest.approx(losses(one), rel=2e-2)
    for lines in (one, two):
        assert re.findall(r"^dev epoch 0 rows (\d+) accuracy: ", lines, re.MULTILINE) == [str(rows)]


def test_squad(base: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """The loss is a mean over each rank's targets, as there; the first is near on any number."""
    where = ["--model-config", tiny("t5", base), "--base-path", base]
    lengths = [*LENGTHS.split(), "8"]
    one, two = (printed(task_programs.SQUAD, tmp_path, ranks, *where, *lengths) for ranks in (1, 2))
    assert losses(two) == pytest.approx(losses(one), rel=5e-2)
    for lines in (one, two):
        (found,) = re.findall(r"^dev epoch 0 rows (\d+) right \d+$", lines, re.MULTILINE)
        assert int(found) == len(SQuAD_Dataset(DATA / "squad", "dev", T5, 96, 8))


def write(prefix: pathlib.Path, rows: list[list[int]]) -> None:
    """Token data by ModelCenter's builder."""
    builder = make_builder(f"{prefix}.bin", "mmap", np.int32)
    for row in rows:
        builder.add_item(torch.tensor(row, dtype=torch.int32))
    builder.end_document()
    builder.finalize(f"{prefix}.idx")


def test_pretraining_of_cpm1(base: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Pieces are packed; the loss falls, and the file of weights is whole."""
    write(tmp_path / "cpm1_lm_0", [list(range(20, 20 + size)) for size in [11, 17, 24, 32] * 4])
    where = ["--model-config", tiny("cpm1", base), "--base-path", tmp_path, "--save", tmp_path]
    rest = ["--save-name", "last", "--max-length", "32", "--train-iters", "8"]
    for ranks in (1, 2):
        lines = printed(task_programs.PRETRAIN_CPM1, tmp_path, ranks, *where, *rest, batch=4)
        assert len(losses(lines)) == 8
        assert losses(lines)[-1] < losses(lines)[0]
        state = torch.load(tmp_path / "last.pt", weights_only=True)
        assert state["input_embedding.weight"].shape[1] == 64
        (tmp_path / "last.pt").unlink()


def test_pretraining_of_cpm2(base: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Rows of an order, every rank its own; rows with equally many targets have equal losses."""
    write(tmp_path / "context", [list(range(20 + row, 30 + row * 2)) for row in range(16)])
    write(tmp_path / "target", [list(range(10 + row, 19 + row)) for row in range(16)])
    where = ["--model-config", tiny("cpm2", base), "--base-path", tmp_path, "--save", tmp_path]
    rest = ["--save-name", "last", "--max-encoder-length", "32", "--max-decoder-length", "12"]
    one, two = (
        printed(task_programs.PRETRAIN_CPM2, tmp_path, ranks, *where, *rest, batch=4)
        for ranks in (1, 2)
    )
    assert len(losses(one)) == 4
    assert losses(two) == pytest.approx(losses(one), rel=2e-2)
    assert (tmp_path / "last.pt").exists()
