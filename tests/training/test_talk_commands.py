"""`python -m model_center generate` and `chat`."""

from __future__ import annotations

import argparse
import io
import os
import pathlib
import sys
from typing import Any

import peft
import pytest
import torch
import transformers
from tests.ranks.runner import run_ranks
from tests.training.lm_programs import tiny

from model_center.__main__ import main
from model_center.commands.generate import add_model_arguments, opened
from model_center.generation import TextGenerator
from model_center.generation.session import Session
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


def sharded(folder: str, *more: str) -> str:
    sys.stdin = io.StringIO("A week has\n")
    sys.stdout = found = io.StringIO()
    assert main(["generate", "--model-config", folder, *COMMON, *more]) == 0
    return found.getvalue()


def test_on_several_ranks(llama: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first one reads and writes; the model is sharded."""
    assert main(["generate", "--model-config", str(llama), *COMMON, "--prompt", "A week has"]) == 0
    want = capsys.readouterr().out
    assert run_ranks(sharded, 2, str(llama), join=False) == [want, ""]


def written_for(folder: pathlib.Path) -> str:
    """The chat template of a folder."""
    tokenizer: Any = LlamaTokenizer.from_pretrained(folder)
    return str(tokenizer.chat_template)


def adapted(base: pathlib.Path, folder: pathlib.Path, **options: Any) -> str:
    """What peft's model with random adapters, written to a folder, says of a text."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], **options)
    wrapped: Any = peft.get_peft_model(model, config)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, param in wrapped.named_parameters():
            if ".lora_" in name:
                param.normal_()
    wrapped.save_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    ids = torch.tensor([tokenizer.encode("A week has")])
    with torch.no_grad():
        out = wrapped.generate(input_ids=ids, max_new_tokens=8, do_sample=False)
    return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))


# peft calls transformers so
@pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6")
def test_adapters(
    llama: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in peft, sharded too; those that do not fit are refused."""
    kinds: list[dict[str, Any]] = [{}, {"use_rslora": True, "lora_alpha": 3}, {"use_dora": True}]
    folders = [str(tmp_path / str(number)) for number in range(len(kinds))]
    given = ""
    for folder, options in zip(folders, kinds, strict=True):
        want = adapted(llama, pathlib.Path(folder), **options)
        capsys.readouterr()
        arguments = ["--model-config", str(llama), "--adapter", folder, "--prompt", "A week has"]
        assert main(["generate", *arguments, *COMMON]) == 0
        given = capsys.readouterr().out
        assert "".join(given.split()) == "".join(want.split())
    assert run_ranks(sharded, 2, str(llama), "--adapter", folders[-1], join=False) == [given, ""]
    tokenizer: Any = LlamaTokenizer.from_pretrained(llama)
    tokenizer.chat_template = "another"
    tokenizer.save_pretrained(folders[0])
    parser = argparse.ArgumentParser()
    add_model_arguments(parser)
    for folder, template in ((folders[0], "another"), (folders[1], written_for(llama))):
        args = parser.parse_args(["--model-config", str(llama), "--adapter", folder])
        assert opened(args, Session()).tokenizer.chat_template == template
    adapted(llama, tmp_path / "patterns", rank_pattern={"q_proj": 2})
    adapted(llama, tmp_path / "vocabulary", modules_to_save=["lm_head"])
    for path, complaint in (
        (tmp_path / "none", "holds no LoRA adapters of peft"),
        (tmp_path / "patterns", "adapters with rank_pattern are not read here"),
        (tmp_path / "vocabulary", "adapters with modules_to_save are not read here"),
    ):
        assert main(["generate", "--model-config", str(llama), "--adapter", str(path)]) == 1
        assert complaint in capsys.readouterr().err
    gpt2 = tiny("gpt2", tmp_path)
    assert main(["generate", "--model-config", str(gpt2), "--adapter", folders[0]]) == 1
    assert "no linear layer of the model" in capsys.readouterr().err


def parted(folder: str, adapters: str) -> str:
    """As where the folder of adapters has a tokenizer on the machine of the first rank alone."""
    os.chdir(f"{adapters}/{os.environ['RANK']}")
    sys.stderr = told = io.StringIO()
    arguments = ["--model-config", folder, "--adapter", "adapter", "--prompt", "A week has"]
    assert main(["generate", *arguments, *COMMON]) == 1
    return told.getvalue()


@pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6")
def test_a_tokenizer_on_one_machine(llama: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """An error on every rank."""
    for rank in (0, 1):
        adapted(llama, tmp_path / str(rank) / "adapter")
    LlamaTokenizer.from_pretrained(llama).save_pretrained(tmp_path / "0" / "adapter")
    found = run_ranks(parted, 2, str(llama), str(tmp_path), join=False)
    assert all("error: " in text for text in found), found


class Broken(io.StringIO):
    """An input that cannot be read."""

    def read(self, size: int | None = -1) -> str:
        raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")


def unread(folder: str) -> str:
    sys.stdin, sys.stderr = Broken(), (told := io.StringIO())
    assert main(["generate", "--model-config", folder, *COMMON]) == 1
    return told.getvalue()


def test_input_that_is_no_text(llama: pathlib.Path) -> None:
    """The first rank reads it; an error on every rank."""
    found = run_ranks(unread, 2, str(llama), join=False)
    assert all("error: " in text and "invalid start byte" in text for text in found), found


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
