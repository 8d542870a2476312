"""The quick start of ModelCenter's README runs as it is written, and a model that knows something
learns by it.
"""

import json
import os
import re
from pathlib import Path

import pytest
import torch
from tests.ranks.runner import run_ranks
from tests.training.lm_programs import DATA, TINY, tiny, train
from tests.training.quick_start import FROM_CONFIG, PROGRAM

BOOLQ = str(DATA / "superglue")


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    """A BERT that is pretrained as far as this goes in seconds: on the task, but not to the end,
    and without its head.
    """
    folder = tmp_path_factory.mktemp("bert")
    arguments = (
        f"--base-path {DATA} {TINY} --dataset_name BoolQ --batch-size 10 --epochs 3 "
        "--train-iters 21 --save"
    )
    train("finetune_bert", "--model-config", tiny("bert", folder), arguments, folder / "run")
    return folder / "run" / "model"


def run(text):
    """On a rank: the program."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    exec(compile(text, "quick_start", "exec"), {"__name__": "__main__"})


@pytest.mark.long
def test_the_quick_start(bert, capfd):
    """Five epochs on two ranks: only rank 0 prints, fp16 finds its scale, and the answers become
    right.

    Of the README, the names of model and data are changed, and the first learning rate: in ten
    steps, its own would reach 1e-7.
    """
    text = PROGRAM.replace('"bert-base-uncased"', repr(str(bert))).replace(
        "'your_path_to_dataset'", repr(BOOLQ)
    )
    changed = text.replace("start_lr = 1e-5", "start_lr = 0.1")
    assert changed != text
    run_ranks(run, 2, changed, join=False, timeout=120)
    printed = capfd.readouterr().out
    losses = re.findall(
        r"^loss: (\d+\.\d+) \| lr: \S+, scale: +\d+\.0000 \| grad_norm: \S+ \|$",
        printed,
        re.MULTILINE,
    )
    accuracy = [
        float(value) for value in re.findall(r"^accuracy: (\d+\.\d\d)$", printed, re.MULTILINE)
    ]
    assert len(losses) == 10, "200 rows are two steps of 64 on two ranks, five times"
    assert float(losses[-1]) < 0.5 < float(losses[0])
    assert len(accuracy) == 5 and accuracy[-1] > 80
    assert len(set(accuracy)) > 1, "it has to learn: its new head is random"


def from_config(config):
    """On a rank: the part for who has no weights, and `bmt.load` of what such a model saves."""
    text = "import bmtrain as bmt\nfrom model_center.model import Bert, BertConfig\n"
    text += FROM_CONFIG.replace("your/path/to/config.json", config).replace(
        "# bmt.load", "bmt.save(model, FILE); bmt.load"
    )
    scope = {"FILE": str(Path(config).with_name("pytorch_model.pt"))}
    exec(text.replace("your/path/to/pytorch_model.pt", scope["FILE"]), scope)
    saved = torch.load(scope["FILE"])
    assert saved["input_embedding.weight"].std().item() == pytest.approx(0.02, rel=0.05)
    assert saved.keys() == scope["model"].state_dict().keys()  # type: ignore[attr-defined]


def test_a_model_from_a_configuration(tmp_path):
    """config.json in ModelCenter's own keys."""
    sizes = {
        "dim_model": 32,
        "num_heads": 2,
        "dim_head": 16,
        "dim_ff": 64,
        "num_layers": 2,
        "vocab_size": 500,
    }
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    run_ranks(from_config, 1, str(tmp_path / "config.json"))
