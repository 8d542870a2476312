"""`convert`: folders of transformers' tiny models made ModelCenter's and back; what it refuses."""

import argparse
import os

import pytest
import torch
from tests.models import parity
from tests.models.test_weights_files import read_folder as read

from model_center import convert
from model_center.errors import ConfigError, IdentifierError, WeightsError
from model_center.model.registry import model_class

SIZES = (
    "hidden_size=24 num_attention_heads=3 num_hidden_layers=2 intermediate_size=40 vocab_size=61"
)
TINY = {
    "gpt2": "GPT2LMHeadModel n_embd=24 n_head=3 n_layer=2 vocab_size=61 n_positions=9 "
    "bos_token_id=None eos_token_id=None",
    "bert": f"BertForPreTraining {SIZES}",
    "t5": "T5ForConditionalGeneration d_model=24 d_kv=8 d_ff=40 num_layers=2 num_heads=3 "
    "vocab_size=61",
    "llama": f"LlamaForCausalLM {SIZES} num_key_value_heads=1 bos_token_id=None eos_token_id=None",
}


def tiny(kind, folder, **options):
    """A random model of transformers, saved."""
    model = parity.their_model(TINY[kind])
    model.save_pretrained(folder, **options)
    return model


def run(*words):
    parser = argparse.ArgumentParser()
    convert.add_arguments(parser)
    convert.run(parser.parse_args([str(word) for word in words]))


@pytest.mark.parametrize("kind", TINY)
def test_there_and_back_is_bitwise(tmp_path, kind, capsys):
    """ModelCenter's folder loads into the class with the values that Hugging Face's gives it; the
    file's dtype is kept.
    """
    tiny(kind, tmp_path / "hf", max_shard_size="20KB")
    (tmp_path / "hf" / "vocab.txt").write_text("a")
    run(tmp_path / "hf", tmp_path / "ours", "--to", "model_center")
    assert {"config.json", "pytorch_model.pt", "vocab.txt"} == set(
        os.listdir(tmp_path / "ours")
    ) - {"generation_config.json"}
    stored = torch.load(tmp_path / "ours" / "pytorch_model.pt", weights_only=True)
    for folder in ("hf", "ours"):
        own = model_class({"model_type": kind}).from_pretrained(tmp_path / folder, dtype="float32")
        state = own.state_dict()
        assert state.keys() == stored.keys()
        assert all(torch.equal(stored[name], value) for name, value in state.items())
    assert {value.dtype for value in stored.values()} == {torch.float32}
    size = sum(value.nbytes for value in stored.values())
    assert (tmp_path / "ours" / "pytorch_model.pt").stat().st_size < 1.5 * size + 20_000
    back = ("--to", "hf", "--model", kind, "--max-shard-size", "20KB")
    run(tmp_path / "ours", tmp_path / "back", *back)
    assert len([*(tmp_path / "back").glob("*.safetensors")]) > 1
    before, after = read(tmp_path / "hf"), read(tmp_path / "back")
    assert all(torch.equal(value, before[name]) for name, value in after.items())
    lost = before.keys() - after.keys()
    assert lost == {f"cls.seq_relationship.{x}" for x in ("weight", "bias") if kind == "bert"}
    assert (tmp_path / "back" / "vocab.txt").read_text() == "a"
    assert capsys.readouterr().out.count("wrote ") == 2


def test_old_files_and_parts_that_are_not_there(tmp_path, capsys):
    """As BERT's first files are: pytorch_model.bin, LayerNorm.gamma, and both of the tied heads."""
    model = tiny("bert", tmp_path / "hf")
    (tmp_path / "hf" / "model.safetensors").unlink()
    norm = "LayerNorm."
    state = {
        name.replace(f"{norm}weight", f"{norm}gamma").replace(f"{norm}bias", f"{norm}beta"): value
        for name, value in model.state_dict().items()
        if "pooler" not in name
    }
    assert "cls.predictions.decoder.weight" in state and "bert.embeddings.LayerNorm.gamma" in state
    torch.save({**state, "what": torch.ones(1)}, tmp_path / "hf" / "pytorch_model.bin")
    run(tmp_path / "hf", tmp_path / "out", "--to", "hf")
    after, before = read(tmp_path / "out"), model.state_dict()
    assert len(after) > 40 and all(torch.equal(x, before[name]) for name, x in after.items())
    told = capsys.readouterr().out
    assert "not in the source, and not written: pooler.dense.weight" in told
    assert "no part of the model, and not written: what" in told


def test_what_is_refused(tmp_path):
    """The target is as it was; classes are known by either name."""
    tiny("gpt2", tmp_path / "hf")
    source, new, full = tmp_path / "hf", tmp_path / "new", tmp_path / "full"
    run(source, tmp_path / "ours", "--to", "model_center", "--model", "GPT2")
    content = (source / "config.json").read_text()
    for name, file, text in (
        ("full", "thesis.tex", ""),
        ("odd", "config.json", '{"model_type": "rwkv"}'),
        ("weightless", "config.json", content),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text(text)
    (tmp_path / "bare").mkdir()
    for place, more, kind, complaint in (
        ("ours", (), ConfigError, "give --model, one of bert, glm, gpt2"),
        ("ours", ("--model", "gpt3"), ConfigError, "'gpt3'.*nearest: 'gpt"),
        ("hf", ("--model", "bert"), ConfigError, "is of a 'gpt2'"),
        ("bare", (), ConfigError, r"no config\.json"),
        ("odd", (), ConfigError, "'rwkv'"),
        ("weightless", (), RuntimeError, "expected one of model"),
        ("absent", (), IdentifierError, "not a folder"),
        ("full/thesis.tex", (), IdentifierError, "is a file: give the folder"),
        ("hf", ("--max-shard-size", "much"), WeightsError, "max_shard_size"),
    ):
        with pytest.raises(kind, match=complaint):
            run(tmp_path / place, new, "--to", "hf", *more)
        assert not new.exists()
    for target in (full, full / "thesis.tex"):
        with pytest.raises(WeightsError, match="exists and is not an empty folder"):
            run(source, target, "--to", "hf")
    assert os.listdir(full) == ["thesis.tex"]
    new.mkdir()
    run(tmp_path / "ours", new, "--to", "hf", "--model", "GPT2")
    assert read(new).keys() == read(source).keys()
