"""Exports are what came in: every entry of config.json, every tensor and every file of a folder of
transformers is in the folder that a model loaded from it writes.
"""

import json
import re
import warnings

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.models import parity
from tests.models.versions import since_5
from tests.ranks.runner import run_ranks

from model_center.model import GPT2, Bert, Llama
from model_center.model.registry import model_class

SIZES = (
    "vocab_size=67 hidden_size=16 intermediate_size=24 num_hidden_layers=2 num_attention_heads=2"
)
SMALL = f"{SIZES} max_position_embeddings=40"
LLAMA = f"{SMALL} num_key_value_heads=1 attention_dropout=0.125"
ROPE = (
    "rope_parameters={'rope_type':'llama3','rope_theta':5e5,'factor':8.0,'low_freq_factor':1.0,"
    "'high_freq_factor':4.0,'original_max_position_embeddings':20}"
)
# their class, and values of the configuration: some that ours knows nothing of
KINDS = {
    "bert": f"BertForMaskedLM {SMALL} attention_probs_dropout_prob=0.25",
    "bert with two heads": f"BertForPreTraining {SMALL}",
    "bert without head": f"BertModel {SMALL} classifier_dropout=0.5",
    "roberta": f"RobertaForMaskedLM {SMALL} pad_token_id=1",
    "llama": f"LlamaForCausalLM {LLAMA} pretraining_tp=2",
    "llama 3": f"LlamaForCausalLM {LLAMA} eos_token_id=[2,5] {ROPE}",
    "qwen2": f"Qwen2ForCausalLM {LLAMA} tie_word_embeddings=True",
    "gpt2": "GPT2LMHeadModel vocab_size=67 n_positions=40 n_embd=16 n_layer=2 n_head=2 "
    "summary_type=mean",
    "t5": "T5ForConditionalGeneration vocab_size=67 d_model=16 d_kv=8 d_ff=24 num_layers=2 "
    "num_heads=2",
    "vit": f"ViTForImageClassification {SIZES} image_size=16 patch_size=8 "
    "attention_probs_dropout_prob=0.25 id2label={0:'cat',1:'dog',2:'horse'}",
}
# What our models have beyond theirs: it is initialised, and written.
NEW = {
    "bert": r"bert\.pooler\.",
    "bert without head": r"cls\.predictions\.",
    "roberta": r"roberta\.pooler\.",
}
# What lies beside weights; the bytes are no tokenizer's, and are not looked at.
NAMES = (
    "tokenizer.json tokenizer_config.json special_tokens_map.json tokenizer.model README.md "
    "chat_template.jinja preprocessor_config.json generation_config.json LICENSE.txt"
)
FILES = {name: f"\r\n\n {name}".encode() for name in NAMES.split()}
FILES["generation_config.json"] = b'{"temperature": 0.6, "top_p":0.9}'


def write(kind, folder):
    parity.their_model(KINDS[kind]).save_pretrained(folder)
    for file, content in FILES.items():
        (folder / file).write_bytes(content)


def tensors_of(folder):
    return load_file(folder / "model.safetensors")


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def assert_same_folders(one, other, new=""):
    """Configurations, tensors but for `new` ones, and files."""
    assert config_of(other) == config_of(one)
    got, want = tensors_of(other), tensors_of(one)
    beyond = {name for name in got if new and re.match(new, name)}
    assert got.keys() - beyond == want.keys() and beyond.isdisjoint(want)
    assert bool(beyond) == bool(new)
    for name, value in want.items():
        assert got[name].dtype == value.dtype and torch.equal(got[name], value), name
    one_names, other_names = (sorted(path.name for path in x.iterdir()) for x in (one, other))
    assert one_names == other_names
    for name, content in FILES.items():
        assert (other / name).read_bytes() == content, name


def export(source, target):
    """On each rank; a warning tells of new heads, on rank 0 alone."""
    for kind in KINDS:
        own = model_class(config_of(source / kind))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore" if kind in NEW else "error")
            model = own.from_pretrained(source / kind, dtype="float32")
        model.save_pretrained(target / kind)


@pytest.mark.parametrize("num_ranks", [pytest.param(0, marks=pytest.mark.long), 2])
def test_a_folder_comes_back_as_it_was(tmp_path, num_ranks):
    for kind in KINDS:
        write(kind, tmp_path / "in" / kind)
    arguments = tmp_path / "in", tmp_path / "out"
    if num_ranks:
        run_ranks(export, num_ranks, *arguments, timeout=180.0)
    else:
        export(*arguments)
    for kind in KINDS:
        assert_same_folders(tmp_path / "in" / kind, tmp_path / "out" / kind, NEW.get(kind, ""))


def test_both_names_of_a_tied_tensor_come_back(tmp_path):
    """Files of BERT from before safetensors have the bias of its head under two names, and norms
    under those of TensorFlow. The folder may go, or be written to.
    """
    write("bert", tmp_path / "in")
    norm, tensors = "bert.embeddings.LayerNorm.", tensors_of(tmp_path / "in")
    tensors["cls.predictions.decoder.bias"] = tensors["cls.predictions.bias"].clone()
    tensors[f"{norm}gamma"] = tensors.pop(f"{norm}weight")
    tensors["bert.embeddings.position_ids"] = torch.arange(40)[None]
    for name in ("in", "same"):
        write("bert", tmp_path / name)
        save_file(tensors, tmp_path / name / "model.safetensors", {"format": "pt"})
    with pytest.warns(UserWarning, match="pooler"):
        model = Bert.from_pretrained(tmp_path / "in", dtype="float32")
    model.save_pretrained(tmp_path / "in")
    assert_same_folders(tmp_path / "same", tmp_path / "in", NEW["bert"])
    for path in (tmp_path / "in").iterdir():
        path.unlink()
    model.save_pretrained(tmp_path / "out")
    assert_same_folders(tmp_path / "same", tmp_path / "out", NEW["bert"])


@since_5  # which loads in that dtype unless it is given another
def test_changes_are_written(tmp_path):
    """Values that a program has set, and the dtype, are those of the new file; others stay."""
    write("llama 3", tmp_path / "in")
    model = Llama.from_pretrained(
        tmp_path / "in", dtype="bfloat16", rope_base=7e5, rope_scaling=None, norm_eps=1e-4
    )
    model.save_pretrained(tmp_path / "out")
    got = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out")
    assert got.dtype == torch.bfloat16 and got.config.rms_norm_eps == 1e-4
    assert got.config.rope_parameters == {"rope_type": "default", "rope_theta": 7e5}
    assert got.config.attention_dropout == 0.125 and got.config.eos_token_id == [2, 5]
    assert {value.dtype for value in tensors_of(tmp_path / "out").values()} == {torch.bfloat16}


def test_a_smaller_model_leaves_layers_out(tmp_path):
    """Layers are no heads of another task."""
    write("llama", tmp_path / "in")
    with pytest.warns(UserWarning, match="is not used"):
        model = Llama.from_pretrained(tmp_path / "in", dtype="float32", num_layers=1)
    model.save_pretrained(tmp_path / "out")
    assert config_of(tmp_path / "out") == {**config_of(tmp_path / "in"), "num_hidden_layers": 1}
    kept = {name for name in tensors_of(tmp_path / "in") if ".layers.1." not in name}
    assert {*tensors_of(tmp_path / "out")} == kept


def test_trained_weights_are_written_and_heads_kept_in_the_dtype(tmp_path):
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


def test_files_come_along_in_our_format(tmp_path):
    write("gpt2", tmp_path / "in")
    model = GPT2.from_pretrained(tmp_path / "in", dtype="float32")
    model.save_pretrained(tmp_path / "ours", format="model_center")
    assert "hugging_face" not in config_of(tmp_path / "ours")
    again = GPT2.from_pretrained(tmp_path / "ours", dtype="float32")
    again.save_pretrained(tmp_path / "theirs")
    got, want = tensors_of(tmp_path / "theirs"), tensors_of(tmp_path / "in")
    assert got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)
    for name, content in FILES.items():
        assert (tmp_path / "ours" / name).read_bytes() == content, name
        assert (tmp_path / "theirs" / name).read_bytes() == content, name
