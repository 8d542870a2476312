"""`convert`: folders of transformers' tiny models made ModelCenter's and back; what it refuses."""

from __future__ import annotations

import argparse
import os
import pathlib
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers

from model_center import convert
from model_center.errors import ConfigError, IdentifierError, WeightsError
from model_center.model.registry import model_class

NO_TOKENS = {"bos_token_id": None, "eos_token_id": None}
TINY: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"n_embd": 24, "n_head": 3, "n_layer": 2, "vocab_size": 61, "n_positions": 9, **NO_TOKENS},
    ),
    "bert": (
        "BertForPreTraining",
        "BertConfig",
        {
            "hidden_size": 24,
            "num_attention_heads": 3,
            "num_hidden_layers": 2,
            "intermediate_size": 40,
            "vocab_size": 61,
        },
    ),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {"d_model": 24, "d_kv": 8, "d_ff": 40, "num_layers": 2, "num_heads": 3, "vocab_size": 61},
    ),
    "llama": (
        "LlamaForCausalLM",
        "LlamaConfig",
        {
            "hidden_size": 24,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "num_hidden_layers": 2,
            "intermediate_size": 40,
            "vocab_size": 61,
            **NO_TOKENS,
        },
    ),
}


def tiny(kind: str, folder: pathlib.Path, **options: Any) -> Any:
    """A random model of transformers, saved."""
    model_name, config_name, values = TINY[kind]
    torch.manual_seed(2)
    model = getattr(transformers, model_name)(getattr(transformers, config_name)(**values))
    for param in model.parameters():
        torch.nn.init.normal_(param)
    model.save_pretrained(folder, **options)
    return model


def run(*words: object) -> None:
    parser = argparse.ArgumentParser()
    convert.add_arguments(parser)
    convert.run(parser.parse_args([str(word) for word in words]))


def read(folder: pathlib.Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= safetensors.torch.load_file(file)
    return found


@pytest.mark.parametrize("kind", TINY)
def test_there_and_back_is_bitwise(
    tmp_path: pathlib.Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny(kind, tmp_path / "hf", max_shard_size="20KB")
    (tmp_path / "hf" / "vocab.txt").write_text("a")
    run(tmp_path / "hf", tmp_path / "ours", "--to", "model_center")
    assert {"config.json", "pytorch_model.pt", "vocab.txt"} <= set(os.listdir(tmp_path / "ours"))
    run(
        tmp_path / "ours",
        tmp_path / "back",
        "--to",
        "hf",
        "--model",
        kind,
        "--max-shard-size",
        "20KB",
    )
    before, after = read(tmp_path / "hf"), read(tmp_path / "back")
    assert kind == "bert" or before.keys() == after.keys()
    for name, value in after.items():
        assert torch.equal(value, before[name]), name
    assert set(before.keys() - after.keys()) <= {
        "cls.seq_relationship.weight",
        "cls.seq_relationship.bias",
    }
    assert (tmp_path / "back" / "vocab.txt").read_text() == "a"
    assert capsys.readouterr().out.count("wrote ") == 2


@pytest.mark.parametrize("kind", TINY)
def test_what_was_converted_is_the_same_model(tmp_path: pathlib.Path, kind: str) -> None:
    """ModelCenter's folder loads into the class with the values that Hugging Face's gives it; the
    file's dtype is kept.
    """
    tiny(kind, tmp_path / "hf")
    run(tmp_path / "hf", tmp_path / "ours", "--to", "model_center")
    own = model_class({"model_type": kind})
    want = own.from_pretrained(tmp_path / "hf", dtype=torch.float32).state_dict()
    got = own.from_pretrained(tmp_path / "ours", dtype=torch.float32).state_dict()
    stored = torch.load(tmp_path / "ours" / "pytorch_model.pt", weights_only=True)
    assert want.keys() == got.keys() == stored.keys()
    for name, value in want.items():
        assert (
            torch.equal(got[name], value)
            and torch.equal(stored[name], value)
            and stored[name].dtype == torch.float32
        ), name


def test_old_files_with_pickles_and_tensorflow_norms(tmp_path: pathlib.Path) -> None:
    """As BERT's first files are: pytorch_model.bin, LayerNorm.gamma, and both of the tied heads."""
    model = tiny("bert", tmp_path / "hf")
    (tmp_path / "hf" / "model.safetensors").unlink()
    state = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): value
        for name, value in model.state_dict().items()
    }
    assert "cls.predictions.decoder.weight" in state and "bert.embeddings.LayerNorm.gamma" in state
    torch.save(state, tmp_path / "hf" / "pytorch_model.bin")
    run(tmp_path / "hf", tmp_path / "out", "--to", "hf")
    after, before = read(tmp_path / "out"), model.state_dict()
    assert len(after) > 40
    for name, value in after.items():
        assert torch.equal(value, before[name]), name


def test_what_is_refused(tmp_path: pathlib.Path) -> None:
    tiny("gpt2", tmp_path / "hf")
    source = tmp_path / "hf"
    run(source, tmp_path / "ours", "--to", "model_center")
    full = tmp_path / "full"
    full.mkdir()
    (full / "thesis.tex").touch()
    (tmp_path / "bare").mkdir()
    odd = tmp_path / "odd"
    odd.mkdir()
    (odd / "config.json").write_text('{"model_type": "rwkv"}')
    empty = tmp_path / "weightless"
    empty.mkdir()
    (empty / "config.json").write_text((source / "config.json").read_text())
    new = tmp_path / "new"
    for words, kind, complaint in (
        ((source, full, "--to", "hf"), WeightsError, "full exists and is no empty folder"),
        (
            (tmp_path / "ours", new, "--to", "hf"),
            ConfigError,
            "give --model, one of bert, glm, gpt2",
        ),
        ((tmp_path / "ours", new, "--to", "hf", "--model", "gpt3"), ConfigError, "'gpt3'"),
        ((source, new, "--to", "hf", "--model", "bert"), ConfigError, "is of a 'gpt2'"),
        ((tmp_path / "bare", new, "--to", "hf"), ConfigError, r"no config\.json"),
        ((odd, new, "--to", "hf"), ConfigError, "'rwkv'"),
        ((empty, new, "--to", "hf"), RuntimeError, "expected one of model"),
        ((tmp_path / "absent", new, "--to", "hf"), IdentifierError, "no folder"),
        ((source, new, "--to", "hf", "--max-shard-size", "much"), WeightsError, "max_shard_size"),
    ):
        with pytest.raises(kind, match=complaint):
            run(*words)
    assert not new.exists() and os.listdir(full) == ["thesis.tex"]


def test_classes_are_known_by_either_name(tmp_path: pathlib.Path) -> None:
    tiny("gpt2", tmp_path / "hf")
    run(tmp_path / "hf", tmp_path / "ours", "--to", "model_center", "--model", "GPT2")
    run(tmp_path / "ours", tmp_path / "a", "--to", "hf", "--model", "GPT2")
    assert read(tmp_path / "a").keys() == read(tmp_path / "hf").keys()
