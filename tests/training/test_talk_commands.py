"""`python -m model_center generate` and `chat`."""

from __future__ import annotations

import io
import pathlib
import sys
from typing import Any

import pytest
import torch
import transformers
from tests.ranks.runner import run_ranks
from tests.training.lm_programs import tiny

from model_center.__main__ import main
from model_center.generation import TextGenerator
from model_center.model import Llama
from model_center.tokenizer import LlamaTokenizer


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A tiny model's folder; its tokenizer has a chat template."""
    return tiny("llama", tmp_path_factory.mktemp("lm"))


COMMON = ["--dtype", "fp32", "--temperature", "0", "--max-new-tokens", "8"]


def expected(folder: pathlib.Path, ids: torch.Tensor) -> str:
    """What transformers writes after these ids."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        out = model.generate(ids, max_new_tokens=8, do_sample=False)
    return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))


def test_texts_are_continued(
    llama: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the command line, or lines of the standard input; as by transformers."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(llama)
    texts = ["Name three fruits", "A week has"]
    want = [expected(llama, torch.tensor([tokenizer.encode(text)])) for text in texts]
    assert main(["generate", "--model-config", str(llama), *COMMON, "--prompt", *texts]) == 0
    given = capsys.readouterr().out
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(texts) + "\n\n"))
    assert main(["generate", "--model-config", str(llama), *COMMON]) == 0
    assert given == capsys.readouterr().out
    assert "".join(given.split()) == "".join("".join(want).split())


def test_a_conversation(
    llama: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each answer follows all that was said since the beginning."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("What is it?\nWhy?\n\nWhat is it?\n"))
    arguments = ["chat", "--model-config", str(llama), *COMMON, "--system", "Be brief."]
    assert main(arguments) == 0
    model = Llama.from_pretrained(llama, dtype=torch.float32).eval()
    writer = TextGenerator(model, LlamaTokenizer.from_pretrained(llama), max_new_tokens=8)
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is it?"}]
    first = "".join(writer.stream_chat(said))
    said += [{"role": "assistant", "content": first}, {"role": "user", "content": "Why?"}]
    second = "".join(writer.stream_chat(said))
    assert capsys.readouterr().out == f"{first}\n{second}\n{first}\n"


def sharded(folder: str) -> str:
    sys.stdin = io.StringIO("A week has\n")
    sys.stdout = found = io.StringIO()
    assert main(["generate", "--model-config", folder, *COMMON]) == 0
    return found.getvalue()


def test_on_several_ranks(llama: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first one reads and writes; the model is sharded."""
    assert main(["generate", "--model-config", str(llama), *COMMON, "--prompt", "A week has"]) == 0
    want = capsys.readouterr().out
    assert run_ranks(sharded, 2, str(llama), join=False) == [want, ""]


def test_models_that_do_not_talk(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other kinds, no chat template, no such model: one line."""
    for command, family, complaint in (
        ("generate", "bert", "bert is a Bert: expected a CausalModel"),
        ("chat", "gpt2", "the tokenizer has no chat template"),
    ):
        folder = str(tiny(family, tmp_path))
        monkeypatch.setattr(sys, "stdin", io.StringIO("a\n"))
        assert main([command, "--model-config", folder, *COMMON]) == 1
        assert complaint in capsys.readouterr().err
    assert main(["chat", "--model-config", str(tmp_path / "none"), *COMMON]) == 1
    assert "error: " in capsys.readouterr().err
