"""`python -m model_center generate` and `chat`."""

import argparse
import io
import os
import sys

import peft
import pytest
import torch
import transformers
from tests.ranks.runner import run_ranks
from tests.training.lm_programs import drawn_adapters, tiny
from tests.training.their_models import make

from bmtrain.runtime import world
from model_center.__main__ import main
from model_center.commands.generate import add_model_arguments, open_generator
from model_center.generation import TextGenerator
from model_center.generation.session import Session
from model_center.model import Llama
from model_center.tokenizer import LlamaTokenizer

# peft calls transformers so
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6")
COMMON = ["--dtype", "fp32", "--temperature", "0", "--max-new-tokens", "8"]
ASKED = ["--prompt", "A week has"]


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A tiny model's folder; its tokenizer has a chat template."""
    return str(tiny("llama", tmp_path_factory.mktemp("lm")))


def said(capsys, model, *more, verb="generate"):
    """What the command prints; what it complains of, if it fails."""
    plain = ["--plain"] if verb == "generate" else []
    status = main([verb, "--model-config", str(model), *COMMON, *plain, *more])
    found = capsys.readouterr()
    return found.err if status else found.out


def continued(model, folder, text, **limit):
    """What transformers writes after a text."""
    reader = transformers.AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor([reader.encode(text)])
    limit = limit or {"max_new_tokens": 8}
    with torch.no_grad():
        out = model.generate(input_ids=ids, do_sample=False, pad_token_id=0, **limit)
    return "".join(str(reader.decode(out[0, ids.shape[1] :], skip_special_tokens=True)).split())


def plain(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def on_a_rank(stdin, model, *more):
    sys.stdin, sys.stdout, sys.stderr = stdin, io.StringIO(), io.StringIO()
    status = main(["generate", "--model-config", model, *COMMON, "--plain", *more])
    return status, sys.stdout.getvalue(), sys.stderr.getvalue()


def sharded(model, *more):
    status, found, _ = on_a_rank(io.StringIO("A week has\n"), model, *more)
    assert status == 0
    return found


def test_texts_are_continued(llama, capsys, monkeypatch):
    """Those of the command line, or lines of the standard input; as by transformers. On several
    ranks the first one reads and writes, and the model is sharded.
    """
    texts = ["A week has", "Name three fruits"]
    want = [continued(plain(llama), llama, text) for text in texts]
    capsys.readouterr()
    given = said(capsys, llama, "--prompt", *texts)
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(texts) + "\n\n"))
    assert given == said(capsys, llama)
    assert "".join(given.split()) == "".join(want)
    alone = said(capsys, llama, *ASKED)
    assert run_ranks(sharded, 2, llama, join=False) == [alone, ""]


def without_a_number(folder):
    """What is said where no number of tokens is named, and where it is too large."""
    sys.stdout, sys.stderr = io.StringIO(), io.StringIO()
    words = ["generate", "--model-config", folder, *ASKED, "--plain", *COMMON[:4]]
    assert main(words) == 0
    assert main([*words, "--max-new-tokens", "512"]) == 1
    return sys.stdout.getvalue(), sys.stderr.getvalue()


def test_answers_end_with_the_positions(tmp_path):
    """Of a model of transformers, too."""
    for folder in (tiny("gpt2", tmp_path), make("gpt_neo", tmp_path)):
        model = plain(folder)
        want = continued(model, folder, ASKED[1], max_length=model.config.max_position_embeddings)
        (found, complaint), *_ = run_ranks(without_a_number, 1, str(folder), join=False)
        assert "".join(found.split()) == want
        assert "positions; ask for at most" in complaint


def test_a_conversation(llama, capsys, monkeypatch):
    """Each answer follows all that was said since the beginning."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("What is it?\nWhy?\n\nWhat is it?\n"))
    found = said(capsys, llama, "--system", "Be brief.", verb="chat")
    model = Llama.from_pretrained(llama, dtype=torch.float32).eval()
    writer = TextGenerator(model, LlamaTokenizer.from_pretrained(llama), max_new_tokens=8)
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is it?"}]
    first = "".join(writer.stream_chat(talk))
    talk += [{"role": "assistant", "content": first}, {"role": "user", "content": "Why?"}]
    second = "".join(writer.stream_chat(talk))
    assert found == f"{first}\n{second}\n{first}\n"


def adapted(base, folder, **options):
    """What peft's model with random adapters, written to a folder, says of a text."""
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], **options)
    wrapped = peft.get_peft_model(plain(base), config)
    torch.manual_seed(0)
    drawn_adapters(wrapped).save_pretrained(folder)
    return continued(wrapped, base, ASKED[1])


@pytest.mark.parametrize(
    "options",
    [
        {"use_rslora": True, "lora_alpha": 3},
        pytest.param({}, marks=pytest.mark.long),
        pytest.param({"use_dora": True}, marks=pytest.mark.long),
    ],
    ids=["rslora", "lora", "dora"],
)
def test_adapters(options, llama, tmp_path, capsys):
    """As in peft, sharded too; the tokenizer is the adapter's, where it has one."""
    folder = str(tmp_path / "adapter")
    want = adapted(llama, tmp_path / "adapter", **options)
    capsys.readouterr()
    given = said(capsys, llama, "--adapter", folder, *ASKED)
    assert "".join(given.split()) == want
    if options != {}:
        assert run_ranks(sharded, 2, llama, "--adapter", folder, join=False) == [given, ""]
    parser = argparse.ArgumentParser()
    add_model_arguments(parser)
    tokenizer = LlamaTokenizer.from_pretrained(llama)
    for template in (tokenizer.chat_template, "another"):
        args = parser.parse_args(["--model-config", llama, "--adapter", folder])
        assert open_generator(args, Session()).tokenizer.chat_template == template
        tokenizer.chat_template = "another"
        tokenizer.save_pretrained(folder)


def test_adapters_that_do_not_fit(llama, tmp_path, capsys):
    adapted(llama, tmp_path / "patterns", rank_pattern={"q_proj": 2})
    adapted(llama, tmp_path / "vocabulary", modules_to_save=["lm_head"])
    adapted(llama, tmp_path / "good")
    for model, name, complaint in (
        (llama, "none", "holds no LoRA adapters of peft"),
        (llama, "patterns", "adapters with rank_pattern are not read here"),
        (llama, "vocabulary", "adapters with modules_to_save are not read here"),
        (tiny("gpt2", tmp_path), "good", "no linear layer of the model"),
    ):
        assert complaint in said(capsys, model, "--adapter", str(tmp_path / name), *ASKED)


class Broken(io.StringIO):
    """An input that cannot be read."""

    def read(self, size=-1):
        raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")


def failing(model, adapters):
    """An input that is no text; a folder of adapters that has a tokenizer on the machine of the
    first rank alone.
    """
    os.chdir(f"{adapters}/{os.environ['RANK']}")
    unread = on_a_rank(Broken(), model)
    world.shutdown()
    parted = on_a_rank(io.StringIO(), model, "--adapter", "adapter", *ASKED)
    assert unread[0] == parted[0] == 1
    return [unread[2], parted[2]]


@pytest.mark.long
def test_what_fails_on_the_first_rank(llama, tmp_path):
    """An error on every rank."""
    for rank in (0, 1):
        adapted(llama, tmp_path / str(rank) / "adapter")
    LlamaTokenizer.from_pretrained(llama).save_pretrained(tmp_path / "0" / "adapter")
    found = run_ranks(failing, 2, llama, str(tmp_path), join=False)
    assert all("error: " in text for texts in found for text in texts), found
    assert all("invalid start byte" in unread for unread, _ in found), found


def test_models_that_do_not_talk(tmp_path, capsys, monkeypatch):
    """Other kinds, no chat template, no such model: one line."""
    for verb, model, complaint in (
        ("generate", tiny("bert", tmp_path), "bert is a Bert: expected a CausalModel"),
        ("chat", tiny("gpt2", tmp_path), "the tokenizer has no chat template"),
        ("chat", tmp_path / "none", "error: "),
    ):
        monkeypatch.setattr(sys, "stdin", io.StringIO("a\n"))
        assert complaint in said(capsys, model, verb=verb)
