"""ModelCenter's programs, unchanged, on tiny models: equal losses on one rank and on two."""

import os
import re
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.ranks.runner import run_ranks
from tests.training import task_programs
from tests.training.lm_programs import DATA, tiny, words_of
from tests.training.seed_stand_ins import offer_cuda

from model_center.dataset.squad import SQuAD_Dataset
from model_center.tokenizer import T5Tokenizer
from model_center.tools.indexed_dataset import make_builder

T5 = T5Tokenizer.from_pretrained(DATA / "tokenizers" / "t5")


def main(path, output, arguments):
    """On a rank: the program as it is, on a machine without GPUs; rank 0's lines go to a file."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    offer_cuda()
    torch.cuda.memory_summary = lambda *_, **__: "no GPU"
    os.chdir(Path(path).parent)
    sys.argv = ["train.py", *arguments]
    with open(f"{output}.{os.environ['RANK']}", "w", encoding="utf-8") as lines:
        sys.stdout = lines
        runpy.run_path(path, run_name="__main__")


HOW = "--lr 1e-3 --lr-decay-style constant --warmup-iters 2 --loss-scale 128 --batch-size"


def printed(text, folder, ranks, *arguments, batch=8):
    """What rank 0 prints on so many ranks; `batch` rows on all together."""
    (folder / "train.py").write_text(task_programs.COMMON + text, "utf-8")
    places = str(folder / "train.py"), str(folder / f"{ranks}.log")
    words = words_of(*arguments, HOW, batch // ranks)
    run_ranks(main, ranks, *places, words, join=False, timeout=240)
    return (folder / f"{ranks}.log.0").read_text("utf-8")


def both(text, folder, *arguments, batch=8):
    """The same on one rank and on two."""
    return [printed(text, folder, ranks, *arguments, batch=batch) for ranks in (1, 2)]


def losses(lines):
    return [float(loss) for loss in re.findall(r"^train .*\| loss: (\S+) ", lines, re.MULTILINE)]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The folder that holds `down_data`, and the tiny models."""
    folder = tmp_path_factory.mktemp("base")
    (folder / "down_data").symlink_to(DATA)
    return folder


LENGTHS = "--max-encoder-length 96 --max-decoder-length"
# Of a family: its program, a length, a task and the rows of its dev split.
PROGRAMS = {
    "bert": (task_programs.BERT, 96, "COPA", 8),
    "gpt2": (task_programs.GPT2, 96, "COPA", 8),
    "gptj": (task_programs.GPTJ, 96, "RTE", 8),
    "llama": (task_programs.LLAMA, 96, "CB", 6),
    "t5": (task_programs.T5, 2, "WiC", 8),
    "t5-v1_1": (task_programs.T5, 2, "MultiRC", 12),
}


@pytest.mark.parametrize(
    "family",
    [name if name == "gpt2" else pytest.param(name, marks=pytest.mark.long) for name in PROGRAMS],
)
def test_fine_tuning(family, base, tmp_path):
    """Every dev row is judged once."""
    text, length, task, rows = PROGRAMS[family]
    where = ["--model-config", tiny(family, base), "--base-path", base, "--dataset", task]
    one, two = both(text, tmp_path, *where, LENGTHS, length)
    assert len(losses(one)) >= 2
    assert losses(two) == pytest.approx(losses(one), rel=2e-2)
    for lines in (one, two):
        assert re.findall(r"^dev epoch 0 rows (\d+) accuracy: ", lines, re.MULTILINE) == [str(rows)]


@pytest.mark.long
def test_squad(base, tmp_path):
    """The loss is a mean over each rank's targets, as there; the first is near on any number."""
    where = ["--model-config", tiny("t5", base), "--base-path", base]
    one, two = both(task_programs.SQUAD, tmp_path, *where, LENGTHS, 8)
    assert losses(two) == pytest.approx(losses(one), rel=5e-2)
    for lines in (one, two):
        (found,) = re.findall(r"^dev epoch 0 rows (\d+) right \d+$", lines, re.MULTILINE)
        assert int(found) == len(SQuAD_Dataset(DATA / "squad", "dev", T5, 96, 8))


def write(prefix, rows):
    """Token data by ModelCenter's builder."""
    builder = make_builder(f"{prefix}.bin", "mmap", np.int32)
    for row in rows:
        builder.add_item(torch.tensor(row, dtype=torch.int32))
    builder.end_document()
    builder.finalize(f"{prefix}.idx")


@pytest.mark.long
def test_pretraining_of_cpm1(base, tmp_path):
    """Pieces are packed; the loss falls, and the file of weights is whole."""
    write(tmp_path / "cpm1_lm_0", [list(range(20, 20 + size)) for size in [11, 17, 24, 32] * 4])
    where = ["--model-config", tiny("cpm1", base), "--base-path", tmp_path, "--save", tmp_path]
    rest = "--save-name last --max-length 32 --train-iters 8"
    for lines in both(task_programs.PRETRAIN_CPM1, tmp_path, *where, rest, batch=4):
        assert len(losses(lines)) == 8
        assert losses(lines)[-1] < losses(lines)[0]
    state = torch.load(tmp_path / "last.pt", weights_only=True)
    assert state["input_embedding.weight"].shape[1] == 64


@pytest.mark.long
def test_pretraining_of_cpm2(base, tmp_path):
    """Rows of an order, every rank its own; rows with equally many targets have equal losses."""
    write(tmp_path / "context", [list(range(20 + row, 30 + row * 2)) for row in range(16)])
    write(tmp_path / "target", [list(range(10 + row, 19 + row)) for row in range(16)])
    where = ["--model-config", tiny("cpm2", base), "--base-path", tmp_path, "--save", tmp_path]
    rest = "--save-name last --max-encoder-length 32 --max-decoder-length 12"
    one, two = both(task_programs.PRETRAIN_CPM2, tmp_path, *where, rest, batch=4)
    assert len(losses(one)) == 4
    assert losses(two) == pytest.approx(losses(one), rel=2e-2)
    assert (tmp_path / "last.pt").exists()
