"""Folders in and out, without a process group and on several ranks: bitwise, read back by
transformers, errors, full disks.
"""

import json
import os
import resource
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import tokenizers
import torch
import transformers
from tests.models import parity
from tests.ranks.runner import run_ranks

import bmtrain as bmt
from model_center.errors import ConfigError, WeightsError
from model_center.model.gpt2 import GPT2, GPT2Config
from model_center.weights.keymap import KeyMap, TensorPart
from model_center.weights.loading import load_weights
from model_center.weights.saving import save_hugging_face, save_model_center

SIZES = "vocab_size=61 n_embd=24 n_head=3 n_layer=2 n_positions=20 resid_pdrop=0.0"
CONFIG = parity.values(f"model_type=gpt2 {SIZES}")
WIDTH = 24
PARTS = {
    "self_att.self_attention.attention_out": "attn.c_proj",
    "ffn.ffn.w_in.w": "mlp.c_fc",
    "ffn.ffn.w_out": "mlp.c_proj",
    "self_att.layernorm_before_attention": "ln_1",
    "ffn.layernorm_before_ffn": "ln_2",
}
KINDS = ("safetensors", "sharded safetensors", "bin", "sharded bin")


def theirs(dtype=torch.float32):
    """The tensors of a GPT-2 of transformers."""
    config = transformers.GPT2Config(**parity.values(SIZES))
    state = parity.randomized(transformers.GPT2LMHeadModel(config)).state_dict()
    return {name: value.to(dtype) for name, value in state.items() if name != "lm_head.weight"}


def ours(tensors):
    """The same under our names, written out by hand."""
    out = {
        "input_embedding.weight": tensors["transformer.wte.weight"],
        "position_embedding.weight": tensors["transformer.wpe.weight"],
    }
    for kind in ("weight", "bias"):
        out[f"encoder.output_layernorm.{kind}"] = tensors[f"transformer.ln_f.{kind}"]
        for layer in (0, 1):
            there, here = f"transformer.h.{layer}.", f"encoder.layers.{layer}."
            packed = tensors[f"{there}attn.c_attn.{kind}"].chunk(3, -1)
            for name, part in zip("qkv", packed, strict=True):
                out[f"{here}self_att.self_attention.project_{name}.{kind}"] = part.t()
            for own, other in PARTS.items():
                out[f"{here}{own}.{kind}"] = tensors[f"{there}{other}.{kind}"].t()
    return {name: value.contiguous() for name, value in out.items()}


def write_folder(folder, tensors, kind=KINDS[0]):
    """A checkpoint as transformers' or ModelCenter's users have it: whole or in two shards."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    names, ending = sorted(tensors), kind.removeprefix("sharded ")
    stem = "model" if ending == "safetensors" else "pytorch_model"
    groups = {f"{stem}.{ending}": names}
    if kind != ending:
        groups = {f"{stem}-{n:05d}-of-00002.{ending}": names[n - 1 :: 2] for n in (1, 2)}
        places = {name: file for file, group in groups.items() for name in group}
        index = json.dumps({"metadata": {}, "weight_map": places})
        (folder / f"{stem}.{ending}.index.json").write_text(index)
    for file, group in groups.items():
        part = {name: tensors[name].contiguous() for name in group}
        if ending == "safetensors":
            safetensors.torch.save_file(part, folder / file, {"format": "pt"})
        else:
            torch.save(part, folder / file)
    return folder


def read_folder(folder):
    """All tensors of a folder of safetensors files, by their own library."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= safetensors.torch.load_file(file)
    return found


def assert_same(got, want):
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert torch.equal(got[name], value) and got[name].dtype == value.dtype, name


def state_of(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def loaded(folder, **kwargs):
    return state_of(GPT2.from_pretrained(folder, **{"dtype": torch.float32, **kwargs}))


def loaded_in_all_ways(root, kinds):
    """All folders below the root, and one in other dtypes."""
    halves = [loaded(root / kinds[0], dtype=dtype) for dtype in (torch.bfloat16, torch.float16)]
    return [*(loaded(root / kind) for kind in kinds), *halves]


def test_every_layout_is_read_on_every_rank(tmp_path):
    """With the prefixes of wrappers, and of classes without head; in any dtype."""
    tensors = theirs()
    for kind in KINDS:
        write_folder(tmp_path / kind, tensors, kind)
    for name, prefix in (("wrapped", "module.transformer."), ("bare", "")):
        spelled = {name.replace("transformer.", prefix): x for name, x in tensors.items()}
        write_folder(tmp_path / name, spelled)
    arguments = tmp_path, [*KINDS, "wrapped", "bare"]
    for states in (loaded_in_all_ways(*arguments), *run_ranks(loaded_in_all_ways, 3, *arguments)):
        for state in states[:6]:
            assert_same(state, ours(tensors))
        for state, dtype in zip(states[6:], (torch.bfloat16, torch.float16), strict=True):
            assert_same(state, {name: x.to(dtype) for name, x in ours(tensors).items()})


SAVES = (("hf", "5GB"), ("hf", "20KB"), ("model_center", "5GB"))


def resaved(root):
    found = []
    for number, (format, size) in enumerate(SAVES):
        model = GPT2.from_pretrained(root / "source", dtype=torch.float32)
        model.save_pretrained(root / str(number), format, max_shard_size=size)
        found.append(loaded(root / str(number)))
    return found


@pytest.mark.parametrize("num_ranks", [0, 3])
def test_round_trips_are_bitwise(tmp_path, num_ranks):
    """Read back by us, by transformers, by the formats' own libraries."""
    tensors = theirs()
    write_folder(tmp_path / "source", tensors)
    results = run_ranks(resaved, num_ranks, tmp_path) if num_ranks else [resaved(tmp_path)]
    for states in results:
        for state in states:
            assert_same(state, ours(tensors))
    for number, num_files in (("0", 1), ("1", 4)):
        assert_same(read_folder(tmp_path / number), tensors)
        files = [*(tmp_path / number).glob("*.safetensors")]
        assert len(files) == num_files
        assert num_files == 1 or all(file.stat().st_size < 23_000 for file in files)
        their_class: Any = transformers.GPT2LMHeadModel  # declared to return a model alone
        other, info = their_class.from_pretrained(tmp_path / number, output_loading_info=True)
        assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        assert_same({name: other.state_dict()[name] for name in tensors}, tensors)
    assert sorted(os.listdir(tmp_path / "2")) == ["config.json", "pytorch_model.pt"]
    assert_same(torch.load(tmp_path / "2" / "pytorch_model.pt", weights_only=True), ours(tensors))


def test_a_model_center_file_may_have_a_row_for_padding(tmp_path):
    """As ModelCenter's GPT-2 files do; they are fp16. A configuration replaces that of the folder,
    alone.
    """
    tensors = ours(theirs(torch.float16))
    table = tensors["input_embedding.weight"]
    config = GPT2Config.from_dict(CONFIG, dtype=torch.float32)
    for rows, match in ((1, "62 rows, the model 61"), (2, "set vocab_size=63|vocab_size=63")):
        padded = torch.cat([table, torch.zeros(rows, WIDTH, dtype=torch.float16)])
        torch.save({**tensors, "input_embedding.weight": padded}, tmp_path / "pytorch_model.pt")
        if rows == 2:
            with pytest.raises(WeightsError, match=match):
                GPT2.from_pretrained(tmp_path, config)
            continue
        with pytest.warns(UserWarning, match=match):
            model = GPT2.from_pretrained(tmp_path, config)
        assert_same(state_of(model), {name: value.float() for name, value in tensors.items()})
    del tensors["input_embedding.weight"]
    torch.save(tensors, tmp_path / "pytorch_model.pt")
    with pytest.raises(WeightsError, match=r"missing: 'input_embedding\.weight'"):
        GPT2.from_pretrained(tmp_path, config)
    with pytest.raises(ConfigError, match="got a config and dtype as well"):
        GPT2.from_pretrained(tmp_path, config, dtype="float32")
    with pytest.raises(ConfigError, match="format is 'pt': expected one of hf, model_center"):
        model.save_pretrained(tmp_path / "out", "pt")


def complaints(folders):
    """What loads that must fail say, on this rank; the model is as before."""
    model = GPT2(GPT2Config.from_dict(CONFIG, dtype=torch.float32))
    if bmt.is_initialized():
        bmt.init_parameters(model)
    before, found = state_of(model), []
    for folder in folders:
        with pytest.raises(WeightsError) as caught:
            load_weights(model, folder, GPT2.key_map(model.config))
        assert_same(state_of(model), before)
        found.append(str(caught.value))
    return found


def complaint_of_one(folder):
    """Only the first rank sees the folder."""
    return complaints([folder if bmt.rank() == 0 else folder / "gone"])


def test_what_does_not_fit_is_explained_on_every_rank(tmp_path):
    tensors = theirs()
    name = "transformer.h.1.attn.c_proj.weight"
    near = "encoder.layers.0.self_att.self_attention.attention_out.weight"
    cases = {
        "missing": (
            {key: x for key, x in tensors.items() if key != name},
            f"(nearest: {near!r}); in their names {name!r}",
        ),
        "many": ({key: x for key, x in tensors.items() if ".h.1." not in key}, "and 8 more"),
        "vocabulary": (
            {**tensors, "transformer.wte.weight": torch.zeros(70, WIDTH)},
            "for that vocabulary set vocab_size=70",
        ),
        "width": ({**tensors, "transformer.wte.weight": torch.zeros(61, 5)}, "model.safetensors"),
        "shape": ({**tensors, name: torch.zeros(WIDTH, 5)}, f"(5, {WIDTH}) in"),
        "turned": ({**tensors, name: torch.zeros(5, 5)}, f"(there {name!r}, turned)"),
        "fused": (
            {**tensors, "transformer.h.0.attn.c_attn.weight": torch.zeros(WIDTH, 99)},
            "another size",
        ),
        "untied": ({**tensors, "lm_head.weight": torch.ones(61, WIDTH)}, "load it with tied=False"),
        "other": (
            {f"bert.{x}": torch.zeros(2) for x in "abcd"},
            "holds no tensor of this model, but bert.a, bert.b, bert.c: it",
        ),
        "ignored": ({"transformer.h.0.attn.bias": torch.zeros(2)}, "but nothing: it belongs"),
    }
    folders = [write_folder(tmp_path / case, content) for case, (content, _) in cases.items()]
    (tmp_path / "empty").mkdir()
    texts = {case: text for case, (_, text) in cases.items()}
    texts["empty"] = "expected one of model.safetensors"
    arguments = [*folders, tmp_path / "empty"]
    for messages in (complaints(arguments), *run_ranks(complaints, 2, arguments)):
        for (case, text), message in zip(texts.items(), messages, strict=True):
            assert text in message and case in message, (case, message)
            assert ("set vocab_size" in message) == (case == "vocabulary")
            assert message.count("missing: ") == {"missing": 1, "many": 8}.get(case, 0)
    for (message,) in run_ranks(complaint_of_one, 2, folders[0]):
        assert ("no such file or folder" in message and "again" in message) or "gone" in message


def with_a_new_head(folder):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config = GPT2Config.from_pretrained(folder, dtype=torch.float32, cls_head=4)
        model = GPT2.without_values(config)
        torch.manual_seed(3)
        report = load_weights(model, folder, GPT2.key_map(config))
    return state_of(model), [str(warning.message) for warning in caught], report._asdict()


def test_new_heads_are_initialised_and_extras_are_named(tmp_path):
    """Once, in two warnings; a head of ours survives a round trip."""
    tensors, head = theirs(), "cls_projection.weight"
    extra = {f"what.{number}": torch.ones(2) for number in range(10)}
    ignored = {"transformer.h.0.attn.bias": torch.ones(1, 1)}
    folder = write_folder(tmp_path / "in", {**tensors, **extra, **ignored})
    alone = with_a_new_head(folder)
    others = run_ranks(with_a_new_head, 2, folder)
    for state, messages, report in (alone, *others):
        assert_same({name: value for name, value in state.items() if name != head}, ours(tensors))
        assert 0.01 < state[head].std() < 0.03 and torch.equal(state[head], alone[0][head])
        expected = {"missing": [head], "unexpected": [*extra], "newly_initialised": [head]}
        assert report == expected
        if messages:
            assert len(messages) == 2 and f"not have {head}: newly" in messages[0]
            assert "what.7 and 2 more of it is not used" in messages[1]
    assert [bool(messages) for _, messages, _ in (alone, *others)] == [True, True, False]
    model = GPT2(GPT2Config.from_dict(CONFIG, dtype=torch.float32, cls_head=4))
    with pytest.warns(UserWarning, match=r"transformers does not use: cls_projection\.weight"):
        model.save_pretrained(tmp_path / "out")
    assert_same(loaded(tmp_path / "out", cls_head=4), state_of(model))


class Pair(torch.nn.Module):
    """Two tensors that their format has once, two of ours that are one, and a buffer."""

    steps: torch.Tensor

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(3, 4, bias=False)
        self.second = torch.nn.Linear(3, 4, bias=False)
        self.table = torch.nn.Embedding(4000, 3)
        self.head = torch.nn.Linear(3, 4000, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("steps", torch.tensor(3))


PAIR = KeyMap(
    {
        "first.weight": TensorPart("one.weight"),
        "second.weight": TensorPart("one.weight"),
        "table.weight": TensorPart("embed.weight"),
    },
    tied={"decoder.weight": "embed.weight"},
)


def test_what_is_one_tensor_must_be_equal(tmp_path):
    """There, to be written; in a file, to be one in the model: the ends of large ones are compared."""
    model, out = Pair(), tmp_path / "out"
    with pytest.raises(WeightsError, match=r"'second\.weight' and 'first\.weight' are one tensor"):
        save_hugging_face(model, out, PAIR, {})
    assert not out.exists()
    with torch.no_grad():
        model.second.weight.copy_(model.first.weight)
    with pytest.warns(UserWarning, match="does not use: steps"):
        save_hugging_face(model, out, PAIR, {})
    want = {"one.weight": model.first.weight, "embed.weight": model.table.weight}
    assert_same(read_folder(out), {**want, "steps": model.steps})
    other = Pair()
    load_weights(other, out, PAIR)
    assert_same(other.state_dict(), model.state_dict())
    state, before = model.state_dict(), state_of(other)
    for key_map, names, match in (
        (PAIR, ("embed.weight", "decoder.weight"), "load it with tied=False"),
        (None, ("table.weight", "head.weight"), "but are one tensor in the model"),
    ):
        content = {**want, "steps": model.steps} if key_map else dict(state)
        for place in (0, -1):
            changed = model.table.weight.detach().clone()
            changed.view(-1)[place] += 1
            tensors = {name: x.detach().clone() for name, x in content.items()}
            tensors |= {names[0]: model.table.weight.detach().clone(), names[1]: changed}
            torch.save(tensors, tmp_path / "pytorch_model.bin")
            with pytest.raises(WeightsError, match=match):
                load_weights(other, tmp_path / "pytorch_model.bin", key_map)
            assert_same(other.state_dict(), before)
    torch.save({n: x for n, x in state.items() if n != "head.weight"}, tmp_path / "one.bin")
    assert load_weights(other, tmp_path / "one.bin").missing == []


def save_limited(folder, limit):
    """Rank 0's disk is full after so many bytes of a file: what each save says, and one after it."""
    model = GPT2.from_pretrained(folder, dtype=torch.float32)
    messages = []
    for format in ("hf", "model_center"):
        if bmt.rank() == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        try:
            with pytest.raises(WeightsError) as caught:
                model.save_pretrained(folder, format)
        finally:
            unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
            resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        messages.append(str(caught.value))
    model.save_pretrained(folder / "after")
    return messages


@pytest.mark.fresh
@pytest.mark.parametrize(("num_ranks", "limit"), [(0, 30_000), (2, 100)])
def test_a_full_disk_leaves_what_was_there(tmp_path, num_ranks, limit):
    folder = write_folder(tmp_path / "model", theirs())
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    results = (
        run_ranks(save_limited, num_ranks, folder, limit)
        if num_ranks
        else [save_limited(folder, limit)]
    )
    for messages in results:
        for message in messages:
            assert "File too large" in message and "model" in message
    assert_same(loaded(folder / "after"), ours(theirs()))
    shutil.rmtree(folder / "after")
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


def test_new_weights_replace_all_old_ones(tmp_path):
    """No file of the checkpoint before is left for a reader to find first; others stay. Nothing
    maps the source's files any more.
    """
    tensors = theirs()
    model = GPT2.from_pretrained(write_folder(tmp_path / "source", tensors), dtype=torch.float32)
    for file in (tmp_path / "source").iterdir():
        file.write_bytes(b"")
    shutil.rmtree(tmp_path / "source")
    assert_same(state_of(model), ours(tensors))
    out = tmp_path / "out"
    (out / ".incoming").mkdir(parents=True)  # of a process that was killed
    (out / "notes.txt").touch()
    shards = {f"model-{place:05d}-of-00004.safetensors" for place in range(1, 5)}
    for format, size, want in (
        ("hf", "20KB", {*shards, "model.safetensors.index.json"}),
        ("hf", "5GB", {"model.safetensors"}),
        ("model_center", "5GB", {"pytorch_model.pt"}),
        ("hf", "5GB", {"model.safetensors"}),
    ):
        model.save_pretrained(out, format, size)
        assert set(os.listdir(out)) == want | {"config.json", "notes.txt"}


def test_places_and_configurations_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    for folder, config, match in (
        (tmp_path / "file", {}, "cannot save to the folder"),
        (tmp_path / "new" / "folder", {"kind": torch.half}, "not JSON serializable"),
    ):
        with pytest.raises(WeightsError, match=match):
            save_hugging_face(Pair(), folder, PAIR, config)
        with pytest.raises(WeightsError, match=match):
            save_model_center(Pair(), folder, config)
    assert os.listdir(tmp_path) == ["file"]


class Tokenizer:
    def save_pretrained(self, folder):
        (Path(folder) / "vocab.txt").write_text("a")


def fast_tokenizer(folder, cuts):
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    if cuts:
        backend.enable_truncation(7, stride=1)
    kind = transformers.PreTrainedTokenizerFast
    kind(tokenizer_object=backend, pad_token="b").save_pretrained(folder)
    return kind.from_pretrained(folder)


def test_a_tokenizer_is_written_as_it_was_loaded(tmp_path):
    """However it has been used, and it can be used as before; a file that says how texts are cut
    still says so. Any kind comes along, in both formats.
    """
    model = GPT2(GPT2Config.from_dict(CONFIG))
    for format in ("hf", "model_center"):
        model.save_pretrained(tmp_path / format, format, tokenizer=Tokenizer())
        assert (tmp_path / format / "vocab.txt").read_text() == "a"
    tokenizer = fast_tokenizer(tmp_path / "plain", cuts=False)
    backend, file = tokenizer.backend_tokenizer, tmp_path / "out" / "tokenizer.json"
    model.save_pretrained(tmp_path / "out", tokenizer=tokenizer)
    assert (backend.truncation, backend.padding) == (None, None)
    unused = file.read_bytes()
    tokenizer("a b a", truncation=True, max_length=2, padding="max_length")
    before = backend.truncation, backend.padding
    model.save_pretrained(tmp_path / "out", tokenizer=tokenizer)
    assert file.read_bytes() == unused
    assert None not in before and before == (backend.truncation, backend.padding)
    model.save_pretrained(tmp_path / "cut", tokenizer=fast_tokenizer(tmp_path / "cuts", cuts=True))
    written = json.loads((tmp_path / "cut" / "tokenizer.json").read_text())
    assert written["truncation"]["max_length"] == 7
