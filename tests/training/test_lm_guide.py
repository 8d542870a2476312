"""The programs in docs/site/en/reference/model_center.md run as they stand there; only names of models and folders
are others.
"""

import os
import re
import sys
import warnings
from pathlib import Path

import pytest
import torch
import transformers
from tests.docs.commands import check, lines
from tests.ranks.runner import run_ranks
from tests.training.lm_programs import DATA, ROOT, TINY, results, tiny, words_of
from tests.training.lm_programs import PROGRAMS as LANGUAGE_MODELS

TEXT = (ROOT / "docs" / "site" / "en" / "reference" / "model_center.md").read_text("utf-8")
PROGRAMS = {
    f"{re.findall(r'^## (.*)$', TEXT[: found.start()], re.MULTILINE)[-1]} {found.start()}": found[1]
    for found in re.finditer(r"```python\n(.*?)```", TEXT, re.DOTALL)
}
MODELS = {
    "bert-base-uncased": "bert",
    "gpt2-base": "gpt2",
    "t5-base": "t5",
    "meta-llama/Llama-3.2-1B": "llama",
}


@pytest.fixture
def folder(tmp_path):
    """Where the programs run, one after another."""
    (tmp_path / "down_data").mkdir()
    (tmp_path / "down_data" / "superglue").symlink_to(DATA / "superglue")
    return tmp_path


def run(text, folder, arguments):
    """On a rank: the program."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.chdir(folder)
    # as the guide says
    warnings.filterwarnings("ignore", message=".*cls_projection.*newly initialised")
    warnings.filterwarnings("ignore", message=".*lm_head.* of it is not used")
    sys.argv = ["train.py", *arguments]
    exec(compile(text, "guide", "exec"), {"__name__": "__main__"})


@pytest.mark.long
def test_the_programs_of_the_guide(folder):
    """The quick start learns; the saved model is one of transformers."""
    words = words_of("--model-config", tiny("bert", folder), TINY, "--batch-size 10 --epochs 3")
    words += words_of("--save", folder / "run", "--resume")
    for program in PROGRAMS.values():
        text = program
        for known, family in MODELS.items():
            text = text.replace(f'"{known}"', repr(str(tiny(family, folder))))
        run_ranks(run, 2, text, str(folder), words, join=False)
    accuracy = results(folder / "run", "accuracy")
    assert len(accuracy) == 3 and accuracy[-1] > 0.85
    made = folder / "bert-for-transformers"
    assert transformers.BertModel.from_pretrained(made).dtype == torch.bfloat16
    assert transformers.AutoTokenizer.from_pretrained(made)("a castle")["input_ids"]
    files = {path.name for path in (folder / "bert-for-model-center").iterdir()}
    tokenizer = {"tokenizer.json", "tokenizer_config.json", "vocab.txt"}
    assert files == {"config.json", "pytorch_model.pt", *tokenizer}


def test_the_commands_of_the_readme():
    """Each names a program that there is, and flags that it has; all programs are named."""
    blocks = re.findall(
        r"```\w*\n(.*?)```", (LANGUAGE_MODELS / "README.md").read_text("utf-8"), flags=re.DOTALL
    )
    found = [words for text in blocks for words in lines(text) if words[0] == "torchrun"]
    for words in found:
        check(words)
    named = {Path(word).name for words in found for word in words if word.endswith(".py")}
    programs = [path.name for path in LANGUAGE_MODELS.glob("*.py")]
    assert named == {name for name in programs if name.startswith(("finetune", "pretrain"))}
