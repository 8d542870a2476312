"""Exports are what came in: every entry of config.json, every tensor and every file of a folder of
transformers is in the folder that a model loaded from it writes.
"""

from __future__ import annotations

import json
import pathlib
import re
import warnings
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from tests.models.parity import randomized
from tests.models.versions import since_5
from tests.ranks.runner import run_ranks

import bmtrain as bmt
from model_center.model import GPT2, T5, Bert, Llama, Qwen2, Roberta, ViT
from model_center.model.base import BaseModel

SMALL: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 40,
}
LLAMA: dict[str, Any] = {**SMALL, "num_key_value_heads": 1, "attention_dropout": 0.125}
# Ours, theirs, and the values of their configuration: some that ours knows nothing of.
KINDS: dict[str, tuple[type[BaseModel], Any, Any]] = {
    "bert": (Bert, hf.BertForMaskedLM, hf.BertConfig(**SMALL, attention_probs_dropout_prob=0.25)),
    "bert with two heads": (Bert, hf.BertForPreTraining, hf.BertConfig(**SMALL)),
    "bert without head": (Bert, hf.BertModel, hf.BertConfig(**SMALL, classifier_dropout=0.5)),
    "roberta": (Roberta, hf.RobertaForMaskedLM, hf.RobertaConfig(**SMALL, pad_token_id=1)),
    "llama": (Llama, hf.LlamaForCausalLM, hf.LlamaConfig(**LLAMA, pretraining_tp=2)),
    "llama 3": (
        Llama,
        hf.LlamaForCausalLM,
        hf.LlamaConfig(
            **LLAMA,
            eos_token_id=[2, 5],
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 5e5,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 20,
            },
        ),
    ),
    "qwen2": (Qwen2, hf.Qwen2ForCausalLM, hf.Qwen2Config(**LLAMA, tie_word_embeddings=True)),
    "gpt2": (
        GPT2,
        hf.GPT2LMHeadModel,
        hf.GPT2Config(
            vocab_size=67, n_positions=40, n_embd=16, n_layer=2, n_head=2, summary_type="mean"
        ),
    ),
    "t5": (
        T5,
        hf.T5ForConditionalGeneration,
        hf.T5Config(vocab_size=67, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2),
    ),
    "vit": (
        ViT,
        hf.ViTForImageClassification,
        hf.ViTConfig(
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            image_size=16,
            patch_size=8,
            attention_probs_dropout_prob=0.25,
            id2label={0: "cat", 1: "dog", 2: "horse"},
        ),
    ),
}
# What our models have beyond theirs: it is initialised, and written.
NEW = {
    "bert": r"bert\.pooler\.",
    "bert without head": r"cls\.predictions\.",
    "roberta": r"roberta\.pooler\.",
}
# What lies beside weights; the bytes are no tokenizer's, and are not looked at.
FILES = {
    "tokenizer.json": b'{ "version" : "1.0"}\n\n',
    "tokenizer_config.json": b'{"tokenizer_class":"PreTrainedTokenizerFast"}',
    "special_tokens_map.json": b"{ }",
    "tokenizer.model": bytes(range(256)),
    "chat_template.jinja": b"{{ messages }}",
    "preprocessor_config.json": b"{}",
    "generation_config.json": b'{"temperature": 0.6, "top_p":0.9}',
    "README.md": b"# A model\r\n",
    "LICENSE.txt": b"As is.",
}


def write(kind: str, folder: pathlib.Path) -> None:
    _, theirs, config = KINDS[kind]
    torch.manual_seed(0)
    randomized(theirs(config)).save_pretrained(folder)
    for name, content in FILES.items():
        (folder / name).write_bytes(content)


def tensors_of(folder: pathlib.Path) -> dict[str, torch.Tensor]:
    return {
        name: value
        for path in sorted(folder.glob("*.safetensors"))
        for name, value in load_file(path).items()
    }


def config_of(folder: pathlib.Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return content


def assert_same_tensors(one: pathlib.Path, other: pathlib.Path, new: str = "") -> None:
    got, want = tensors_of(other), tensors_of(one)
    beyond = {name for name in got if new and re.match(new, name)}
    assert got.keys() - beyond == want.keys() and beyond.isdisjoint(want)
    assert bool(beyond) == bool(new)
    for name, value in want.items():
        assert got[name].dtype == value.dtype and torch.equal(got[name], value), name


def assert_same_folders(one: pathlib.Path, other: pathlib.Path, new: str = "") -> None:
    assert config_of(other) == config_of(one)
    assert_same_tensors(one, other, new)
    assert sorted(path.name for path in other.iterdir()) == sorted(
        path.name for path in one.iterdir()
    )
    for name, content in FILES.items():
        assert (other / name).read_bytes() == content, name


def export(source: str, target: str, kinds: list[str]) -> None:
    """On each rank; new heads are told of, on rank 0 alone."""
    for kind in kinds:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore" if kind in NEW else "error")
            model = KINDS[kind][0].from_pretrained(pathlib.Path(source, kind), dtype="float32")
        model.save_pretrained(pathlib.Path(target, kind))


@pytest.mark.parametrize("num_ranks", [0, 2])
def test_a_folder_comes_back_as_it_was(tmp_path: pathlib.Path, num_ranks: int) -> None:
    """In a plain process and on two ranks."""
    for kind in KINDS:
        write(kind, tmp_path / "in" / kind)
    arguments = (str(tmp_path / "in"), str(tmp_path / "out"), list(KINDS))
    if num_ranks:
        run_ranks(export, num_ranks, *arguments, timeout=180.0)
    else:
        export(*arguments)
    for kind in KINDS:
        assert_same_folders(tmp_path / "in" / kind, tmp_path / "out" / kind, NEW.get(kind, ""))


def test_both_names_of_a_tied_tensor_come_back(tmp_path: pathlib.Path) -> None:
    """Files of BERT from before safetensors have the bias of its head under two names, and norms
    under those of TensorFlow.
    """
    write("bert", tmp_path / "in")
    tensors = tensors_of(tmp_path / "in")
    bias = tensors["cls.predictions.bias"]
    tensors["cls.predictions.decoder.bias"] = bias.clone()
    tensors["bert.embeddings.LayerNorm.gamma"] = tensors.pop("bert.embeddings.LayerNorm.weight")
    tensors["bert.embeddings.position_ids"] = torch.arange(40)[None]
    save_file(tensors, tmp_path / "in" / "model.safetensors", {"format": "pt"})
    with pytest.warns(UserWarning, match="pooler"):
        model = Bert.from_pretrained(tmp_path / "in", dtype="float32")
    model.save_pretrained(tmp_path / "out")
    assert_same_folders(tmp_path / "in", tmp_path / "out", NEW["bert"])


@since_5  # which loads in that dtype unless it is asked for another
def test_what_has_changed_is_said(tmp_path: pathlib.Path) -> None:
    """Values that a program has set, and the dtype, are those of the new file; others stay."""
    write("llama 3", tmp_path / "in")
    model = Llama.from_pretrained(
        tmp_path / "in", dtype="bfloat16", rope_base=7e5, rope_scaling=None, norm_eps=1e-4
    )
    model.save_pretrained(tmp_path / "out")
    got = hf.LlamaForCausalLM.from_pretrained(tmp_path / "out")
    assert got.dtype == torch.bfloat16
    assert got.config.rope_parameters == {"rope_type": "default", "rope_theta": 7e5}
    assert got.config.rms_norm_eps == 1e-4
    assert got.config.attention_dropout == 0.125 and got.config.eos_token_id == [2, 5]
    assert all(value.dtype == torch.bfloat16 for value in tensors_of(tmp_path / "out").values())


def test_a_smaller_model_leaves_layers_out(tmp_path: pathlib.Path) -> None:
    """Layers are no heads of another task."""
    write("llama", tmp_path / "in")
    with pytest.warns(UserWarning, match="is not used"):
        model = Llama.from_pretrained(tmp_path / "in", dtype="float32", num_layers=1)
    model.save_pretrained(tmp_path / "out")
    assert config_of(tmp_path / "out") == {**config_of(tmp_path / "in"), "num_hidden_layers": 1}
    assert {*tensors_of(tmp_path / "out")} == {
        name for name in tensors_of(tmp_path / "in") if ".layers.1." not in name
    }


def test_trained_weights_are_written_and_heads_kept_in_the_dtype(tmp_path: pathlib.Path) -> None:
    write("bert with two heads", tmp_path / "in")
    model = Bert.from_pretrained(tmp_path / "in", dtype="float16")
    with torch.no_grad():
        model.input_embedding.weight.add_(1)
    model.save_pretrained(tmp_path / "out")
    want = {name: value.half() for name, value in tensors_of(tmp_path / "in").items()}
    want["bert.embeddings.word_embeddings.weight"] += 1
    got = tensors_of(tmp_path / "out")
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], value) for name, value in want.items())
    assert config_of(tmp_path / "out") == {**config_of(tmp_path / "in"), "dtype": "float16"}


def test_the_folder_may_go_and_may_be_written_to(tmp_path: pathlib.Path) -> None:
    """What is kept does not depend on it."""
    write("bert with two heads", tmp_path / "in")
    write("bert with two heads", tmp_path / "same")
    model = Bert.from_pretrained(tmp_path / "in", dtype="float32")
    model.save_pretrained(tmp_path / "in")
    assert_same_folders(tmp_path / "same", tmp_path / "in")
    for path in (tmp_path / "in").iterdir():
        path.unlink()
    model.save_pretrained(tmp_path / "out")
    assert_same_folders(tmp_path / "same", tmp_path / "out")


def test_files_come_along_in_our_format(tmp_path: pathlib.Path) -> None:
    write("gpt2", tmp_path / "in")
    model = GPT2.from_pretrained(tmp_path / "in", dtype="float32")
    model.save_pretrained(tmp_path / "ours", format="model_center")
    for name, content in FILES.items():
        assert (tmp_path / "ours" / name).read_bytes() == content, name
    assert "hugging_face" not in json.loads((tmp_path / "ours" / "config.json").read_text())
    again = GPT2.from_pretrained(tmp_path / "ours", dtype="float32")
    again.save_pretrained(tmp_path / "theirs")
    assert_same_tensors(tmp_path / "in", tmp_path / "theirs")
    assert (tmp_path / "theirs" / "tokenizer.json").read_bytes() == FILES["tokenizer.json"]
    assert bmt.is_initialized() is False
