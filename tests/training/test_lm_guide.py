"""The programs in docs/site/en/reference/model_center.md run as they stand there; only names of models and folders
are others.
"""

from __future__ import annotations

import os
import pathlib
import re
import shlex
import sys
import warnings

import pytest
import torch
import transformers
from tests.ranks.runner import run_ranks
from tests.training.lm_programs import DATA, ROOT, TINY, tiny
from tests.training.lm_programs import PROGRAMS as LANGUAGE_MODELS

from model_center.arguments import make_parser, parse_args
from model_center.training.metrics_file import read_metrics

TEXT = (ROOT / "docs" / "site" / "en" / "reference" / "model_center.md").read_text(encoding="utf-8")
PROGRAMS = {
    re.findall(r"^## (.*)$", TEXT[: found.start()], re.MULTILINE)[-1] + f" {found.start()}": found[
        1
    ]
    for found in re.finditer(r"```python\n(.*?)```", TEXT, re.DOTALL)
}
MODELS = {
    "bert-base-uncased": "bert",
    "gpt2-base": "gpt2",
    "t5-base": "t5",
    "meta-llama/Llama-3.2-1B": "llama",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Where the programs run, one after another."""
    out = tmp_path_factory.mktemp("guide")
    (out / "down_data").mkdir()
    (out / "down_data" / "superglue").symlink_to(DATA / "superglue")
    return out


def run(text: str, folder: str, arguments: list[str]) -> None:
    """On a rank: the program."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.chdir(folder)
    # as the guide says
    warnings.filterwarnings("ignore", message=".*cls_projection.*newly initialised")
    warnings.filterwarnings("ignore", message=".*lm_head.* of it is not used")
    sys.argv = ["train.py", *arguments]
    exec(compile(text, "guide", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_of_the_guide(name: str, folder: pathlib.Path) -> None:
    text = PROGRAMS[name]
    for known, family in MODELS.items():
        text = text.replace(f'"{known}"', repr(str(tiny(family, folder))))
    arguments = (
        f"--model-config {tiny('bert', folder)} {TINY} --batch-size 10 --epochs 3 --save "
        f"{folder}/run --resume"
    ).split()
    run_ranks(run, 2, text, str(folder), arguments, join=False)


def test_what_they_left(folder: pathlib.Path) -> None:
    """The quick start has learned; the saved model is one of transformers."""
    accuracy = [
        record["accuracy"]
        for record in read_metrics(folder / "run" / "metrics.jsonl")
        if "accuracy" in record
    ]
    assert len(accuracy) == 3 and accuracy[-1] > 0.85
    loaded = transformers.BertModel.from_pretrained(folder / "bert-for-transformers")
    assert loaded.dtype == torch.bfloat16
    assert transformers.AutoTokenizer.from_pretrained(folder / "bert-for-transformers")("a castle")[
        "input_ids"
    ]
    assert {path.name for path in (folder / "bert-for-model-center").iterdir()} == {
        "config.json",
        "pytorch_model.pt",
        "tokenizer.json",
        "tokenizer_config.json",
        "vocab.txt",
    }


def test_every_section_shows_something() -> None:
    sections = {name.rpartition(" ")[0] for name in PROGRAMS}
    assert sections == {
        "Quick start",
        "Loading",
        "Your own data",
        "Generation",
        "LoRA",
        "Files out",
    }


def test_the_commands_of_the_readme() -> None:
    """Each names a program that there is, and flags that it has."""
    text = (LANGUAGE_MODELS / "README.md").read_text(encoding="utf-8").replace("\\\n", " ")
    commands = [shlex.split(line)[3:] for line in text.splitlines() if line.startswith("torchrun ")]
    assert {command[0].rpartition("/")[2] for command in commands} == {
        path.name
        for path in LANGUAGE_MODELS.glob("*.py")
        if path.name.startswith(("finetune", "pretrain"))
    }
    own = {"finetune_t5_squad.py": ["--beam-size"]}
    for program, *arguments in commands:
        parser = make_parser()
        for flag in own.get(program.rpartition("/")[2], []):
            parser.add_argument(flag, type=float)
        parse_args(parser, arguments, required=["--model-config", "--base-path"])
