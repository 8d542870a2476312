"""Folders in and out, without a process group and on several ranks: bitwise, read back by
transformers, errors, full disks.
"""

from __future__ import annotations

import json
import os
import pathlib
import resource
import shutil
import warnings
from typing import Any

import pytest
import safetensors.torch
import tokenizers
import torch
from tests.ranks.runner import run_ranks
from transformers import PreTrainedTokenizerFast

import bmtrain as bmt
from model_center.errors import WeightsError
from model_center.model.gpt2 import GPT2, GPT2Config
from model_center.weights.keymap import KeyMap, Piece
from model_center.weights.loading import load_weights
from model_center.weights.saving import save_hugging_face, save_model_center

State = dict[str, torch.Tensor]
CONFIG = {
    "model_type": "gpt2",
    "vocab_size": 61,
    "n_embd": 24,
    "n_head": 3,
    "n_layer": 2,
    "n_positions": 20,
    "resid_pdrop": 0.0,
}
WIDTH = 24
PARTS = {
    "self_att.self_attention.attention_out": "attn.c_proj",
    "ffn.ffn.w_in.w": "mlp.c_fc",
    "ffn.ffn.w_out": "mlp.c_proj",
}


def shapes() -> dict[str, tuple[int, ...]]:
    """What transformers calls the tensors of a GPT-2 of that configuration."""
    found = {
        "wte.weight": (61, WIDTH),
        "wpe.weight": (20, WIDTH),
        "ln_f.weight": (WIDTH,),
        "ln_f.bias": (WIDTH,),
    }
    for layer in (0, 1):
        for name, size in (
            ("attn.c_attn", (WIDTH, 72)),
            ("attn.c_proj", (WIDTH, WIDTH)),
            ("mlp.c_fc", (WIDTH, 96)),
            ("mlp.c_proj", (96, WIDTH)),
        ):
            found[f"h.{layer}.{name}.weight"], found[f"h.{layer}.{name}.bias"] = size, size[1:]
        for name in ("ln_1", "ln_2"):
            found[f"h.{layer}.{name}.weight"] = found[f"h.{layer}.{name}.bias"] = (WIDTH,)
    return {f"transformer.{name}": size for name, size in found.items()}


def theirs(dtype: torch.dtype = torch.float32) -> State:
    generator = torch.Generator().manual_seed(7)
    return {
        name: torch.randn(size, generator=generator).to(dtype) for name, size in shapes().items()
    }


def ours(tensors: State) -> State:
    """The same under our names, written out by hand."""
    out = {
        "input_embedding.weight": tensors["transformer.wte.weight"],
        "position_embedding.weight": tensors["transformer.wpe.weight"],
        "encoder.output_layernorm.weight": tensors["transformer.ln_f.weight"],
        "encoder.output_layernorm.bias": tensors["transformer.ln_f.bias"],
    }
    for layer in (0, 1):
        there, here = f"transformer.h.{layer}.", f"encoder.layers.{layer}."
        for kind in ("weight", "bias"):
            for name, place in (("q", 0), ("k", 1), ("v", 2)):
                columns = tensors[f"{there}attn.c_attn.{kind}"][
                    ..., WIDTH * place : WIDTH * (place + 1)
                ]
                out[f"{here}self_att.self_attention.project_{name}.{kind}"] = (
                    columns.t() if kind == "weight" else columns
                )
            for own, other in (
                ("self_att.self_attention.attention_out", "attn.c_proj"),
                ("ffn.ffn.w_in.w", "mlp.c_fc"),
                ("ffn.ffn.w_out", "mlp.c_proj"),
            ):
                value = tensors[f"{there}{other}.{kind}"]
                out[f"{here}{own}.{kind}"] = value.t() if kind == "weight" else value
            out[f"{here}self_att.layernorm_before_attention.{kind}"] = tensors[
                f"{there}ln_1.{kind}"
            ]
            out[f"{here}ffn.layernorm_before_ffn.{kind}"] = tensors[f"{there}ln_2.{kind}"]
    return out


def write_folder(
    folder: pathlib.Path, tensors: State, kind: str = "safetensors", **config: Any
) -> pathlib.Path:
    """A checkpoint as transformers' or ModelCenter's users have it: whole or in two shards."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    names = sorted(tensors)
    ending = "safetensors" if "safetensors" in kind else "bin"
    stem = "model" if ending == "safetensors" else "pytorch_model"
    groups = [names[::2], names[1::2]] if kind.startswith("sharded") else [names]
    files = (
        [f"{stem}-{place:05d}-of-00002.{ending}" for place in (1, 2)]
        if len(groups) == 2
        else [f"{stem}.{ending}"]
    )
    for file, group in zip(files, groups, strict=True):
        part = {name: tensors[name].contiguous() for name in group}
        if ending == "safetensors":
            safetensors.torch.save_file(part, folder / file, {"format": "pt"})
        else:
            torch.save(part, folder / file)
    if len(groups) == 2:
        places = {name: file for file, group in zip(files, groups, strict=True) for name in group}
        (folder / f"{stem}.{ending}.index.json").write_text(
            json.dumps({"metadata": {}, "weight_map": places})
        )
    return folder


def read_folder(folder: pathlib.Path) -> State:
    """All tensors of a folder of safetensors files, by their own library."""
    found: State = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= safetensors.torch.load_file(file)
    return found


def assert_same(got: State, want: State) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert torch.equal(got[name], value) and got[name].dtype == value.dtype, name


def state_of(model: torch.nn.Module) -> State:
    return {name: value.clone() for name, value in model.state_dict().items()}


def loaded(folder: str, **kwargs: Any) -> State:
    return state_of(GPT2.from_pretrained(folder, **{"dtype": torch.float32, **kwargs}))


def on_all(num_ranks: int, function: Any, *args: Any) -> list[Any]:
    """The results of all ranks; 0 ranks are this process, without a process group."""
    return run_ranks(function, num_ranks, *args) if num_ranks else [function(*args)]


@pytest.mark.parametrize("num_ranks", [0, 1, 2, 4])
@pytest.mark.parametrize("kind", ["safetensors", "sharded safetensors", "bin", "sharded bin"])
def test_every_layout_of_hugging_face_is_read(
    tmp_path: pathlib.Path, kind: str, num_ranks: int
) -> None:
    tensors = theirs()
    folder = write_folder(tmp_path, tensors, kind)
    for state in on_all(num_ranks, loaded, str(folder)):
        assert_same(state, ours(tensors))


@pytest.mark.parametrize(
    "spell", [lambda name: "module." + name, lambda name: name.removeprefix("transformer.")]
)
def test_prefixes_of_wrappers_and_classes_without_head(tmp_path: pathlib.Path, spell: Any) -> None:
    tensors = theirs()
    folder = write_folder(tmp_path, {spell(name): value for name, value in tensors.items()})
    assert_same(loaded(str(folder)), ours(tensors))


def resaved(source: str, target: str, format: str, size: str) -> State:
    model = GPT2.from_pretrained(source, dtype=torch.float32)
    model.save_pretrained(target, format, max_shard_size=size)
    return loaded(target)


@pytest.mark.parametrize("num_ranks", [0, 1, 2, 4])
def test_round_trips_are_bitwise(tmp_path: pathlib.Path, num_ranks: int) -> None:
    tensors = theirs()
    folder = write_folder(tmp_path / "source", tensors)
    for format, size in (("hf", "5GB"), ("hf", "20KB"), ("model_center", "5GB")):
        target = tmp_path / f"{format} {size}"
        for state in on_all(num_ranks, resaved, str(folder), str(target), format, size):
            assert_same(state, ours(tensors))
        if format == "hf":
            assert_same(read_folder(target), tensors)
            assert len(list(target.glob("*.safetensors"))) == (1 if size == "5GB" else 4)
            assert all(
                file.stat().st_size < 23_000
                for file in target.glob("*.safetensors")
                if size == "20KB"
            )
        else:
            assert sorted(os.listdir(target)) == ["config.json", "pytorch_model.pt"]
            assert_same(torch.load(target / "pytorch_model.pt", weights_only=True), ours(tensors))


@pytest.mark.parametrize("size", ["5GB", "20KB"])
def test_transformers_reads_what_is_written(tmp_path: pathlib.Path, size: str) -> None:
    import transformers

    tensors = theirs()
    model = GPT2.from_pretrained(
        write_folder(tmp_path / "source", tensors), dtype=torch.float32
    ).eval()
    model.save_pretrained(tmp_path / "target", max_shard_size=size)
    their_class: Any = transformers.GPT2LMHeadModel  # declared to return a model alone
    other, info = their_class.from_pretrained(
        tmp_path / "target", output_loading_info=True, bos_token_id=0, eos_token_id=0
    )
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), (
        info
    )
    state = other.state_dict()
    assert_same({name: state[name] for name in tensors}, tensors)
    ids = torch.arange(14).view(2, 7)
    torch.testing.assert_close(model(ids).logits, other(ids).logits)


def test_dtypes_are_converted_on_the_way(tmp_path: pathlib.Path) -> None:
    tensors = theirs()
    folder = write_folder(tmp_path, tensors)
    for dtype in (torch.bfloat16, torch.float16):
        want = {name: value.to(dtype) for name, value in ours(tensors).items()}
        assert_same(loaded(str(folder), dtype=dtype), want)
        for state in run_ranks(loaded_as, 2, str(folder), dtype):
            assert_same(state, want)


def loaded_as(folder: str, dtype: torch.dtype) -> State:
    return loaded(folder, dtype=dtype)


def test_a_model_center_file_may_have_a_row_for_padding(tmp_path: pathlib.Path) -> None:
    """As ModelCenter's GPT-2 files do; they are fp16."""
    tensors = ours(theirs(torch.float16))
    padded = {
        **tensors,
        "input_embedding.weight": torch.cat(
            [tensors["input_embedding.weight"], torch.zeros(1, WIDTH)]
        ),
    }
    torch.save(padded, tmp_path / "pytorch_model.pt")
    config = GPT2Config.from_dict(CONFIG, dtype=torch.float32)
    with pytest.warns(UserWarning, match="62 rows, the model 61"):
        model = GPT2.from_pretrained(tmp_path, config)
    assert_same(state_of(model), {name: value.float() for name, value in tensors.items()})


def complaint(folder: str, **config: Any) -> str:
    """What a load that must fail says, on this rank; the model is as before."""
    model = GPT2(GPT2Config.from_dict({**CONFIG, **config}, dtype=torch.float32))
    if bmt.is_initialized():
        bmt.init_parameters(model)
    before = state_of(model)
    with pytest.raises(WeightsError) as caught:
        load_weights(model, folder, GPT2.key_map(model.config))
    assert_same(state_of(model), before)
    return str(caught.value)


def complaints(folders: list[str]) -> list[str]:
    return [complaint(folder) for folder in folders]


def test_what_does_not_fit_is_explained_on_every_rank(tmp_path: pathlib.Path) -> None:
    tensors = theirs()
    name = "transformer.h.1.attn.c_proj.weight"
    cases = {
        "missing": ({key: value for key, value in tensors.items() if key != name}, f"{name!r}"),
        "vocabulary": (
            {**tensors, "transformer.wte.weight": torch.zeros(70, WIDTH)},
            "set vocab_size=70",
        ),
        "shape": ({**tensors, name: torch.zeros(WIDTH, 5)}, f"(5, {WIDTH}) in"),
        "fused": (
            {**tensors, "transformer.h.0.attn.c_attn.weight": torch.zeros(WIDTH, 99)},
            "another size",
        ),
        "untied": ({**tensors, "lm_head.weight": torch.ones(61, WIDTH)}, "load it with tied=False"),
        "other": (
            {"bert.pooler.weight": torch.zeros(2)},
            "holds no tensor of this model, but bert.pooler.weight",
        ),
    }
    folders = [str(write_folder(tmp_path / case, content)) for case, (content, _) in cases.items()]
    (tmp_path / "empty").mkdir()
    texts = {
        **{case: text for case, (_, text) in cases.items()},
        "empty": "expected one of model.safetensors",
    }
    for messages in (
        complaints([*folders, str(tmp_path / "empty")]),
        *run_ranks(complaints, 2, [*folders, str(tmp_path / "empty")]),
    ):
        for (case, text), message in zip(texts.items(), messages, strict=True):
            assert text in message and case in message, (case, message)


def elsewhere(folder: str) -> str:
    return complaint(folder if bmt.rank() == 0 else folder + "gone")


def test_a_folder_that_one_rank_cannot_see_is_an_error_on_all(tmp_path: pathlib.Path) -> None:
    for message in run_ranks(elsewhere, 2, str(write_folder(tmp_path / "a", theirs()))):
        assert ("no such file or folder" in message and "again" in message) or "gone" in message


def with_a_new_head(folder: str) -> tuple[State, list[str], Any]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config = GPT2Config.from_pretrained(folder, dtype=torch.float32, cls_head=4)
        model = GPT2.without_values(config)
        torch.manual_seed(3)
        report = load_weights(model, folder, GPT2.key_map(config))
    return state_of(model), [str(warning.message) for warning in caught], report._asdict()


def test_new_heads_are_initialised_and_named_and_extras_are_told(tmp_path: pathlib.Path) -> None:
    tensors = theirs()
    folder = write_folder(
        tmp_path,
        {**tensors, "what.is.this": torch.ones(2), "transformer.h.0.attn.bias": torch.ones(1, 1)},
    )
    head = "cls_projection.weight"
    alone = with_a_new_head(str(folder))
    for state, messages, report in (alone, *run_ranks(with_a_new_head, 2, str(folder))):
        assert_same({name: value for name, value in state.items() if name != head}, ours(tensors))
        assert 0.01 < state[head].std() < 0.03 and torch.equal(state[head], alone[0][head])
        assert report == {
            "missing": [head],
            "unexpected": ["what.is.this"],
            "newly_initialised": [head],
        }
        if messages:
            assert (
                len(messages) == 2
                and f"not have {head}: newly" in messages[0]
                and "what.is.this of it is not" in messages[1]
            )
    assert alone[1]


def test_a_head_of_ours_survives_the_round_trip(tmp_path: pathlib.Path) -> None:
    model = GPT2(GPT2Config.from_dict(CONFIG, dtype=torch.float32, cls_head=4))
    with pytest.warns(UserWarning, match=r"transformers does not use: cls_projection\.weight"):
        model.save_pretrained(tmp_path)
    assert_same(loaded(str(tmp_path), cls_head=4), state_of(model))


class Pair(torch.nn.Module):
    """Two tensors that their format has once, and two of ours that are one."""

    steps: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (
            torch.nn.Linear(3, 4, bias=False),
            torch.nn.Linear(3, 4, bias=False),
        )
        self.table = torch.nn.Embedding(5, 3)
        self.head = torch.nn.Linear(3, 5, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("steps", torch.tensor(3))


PAIR = KeyMap(
    {
        "first.weight": Piece("one.weight"),
        "second.weight": Piece("one.weight"),
        "table.weight": Piece("embed.weight"),
    }
)


def test_what_is_one_tensor_there_must_be_equal_here(tmp_path: pathlib.Path) -> None:
    model = Pair()
    with pytest.raises(WeightsError, match=r"'second\.weight' and 'first\.weight' are one tensor"):
        save_hugging_face(model, tmp_path / "out", PAIR, {})
    assert not (tmp_path / "out").exists()
    with torch.no_grad():
        model.second.weight.copy_(model.first.weight)
    with pytest.warns(UserWarning, match="does not use: steps"):
        save_hugging_face(model, tmp_path / "out", PAIR, {})
    assert_same(
        read_folder(tmp_path / "out"),
        {
            "one.weight": model.first.weight,
            "embed.weight": model.table.weight,
            "steps": model.steps,
        },
    )
    other = Pair()
    load_weights(other, tmp_path / "out", PAIR)
    assert_same(other.state_dict(), model.state_dict())


def save_limited(folder: str, limit: int) -> list[str]:
    """Rank 0's disk is full after so many bytes of a file: what each save says."""
    model = GPT2.from_pretrained(folder, dtype=torch.float32)
    if bmt.rank() == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    messages = []
    try:
        for format in ("hf", "model_center"):
            with pytest.raises(WeightsError) as caught:
                model.save_pretrained(folder, format)
            messages.append(str(caught.value))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return messages


@pytest.mark.parametrize(("num_ranks", "limit"), [(0, 30_000), (2, 100), (2, 30_000)])
def test_a_full_disk_leaves_what_was_there(
    tmp_path: pathlib.Path, num_ranks: int, limit: int
) -> None:
    folder = write_folder(tmp_path / "model", theirs())
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    for messages in on_all(num_ranks, save_limited, str(folder), limit):
        for message in messages:
            assert "File too large" in message and "model" in message
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


def test_new_weights_replace_all_old_ones(tmp_path: pathlib.Path) -> None:
    """No file of the checkpoint before is left for a reader to find first; others stay."""
    model = GPT2.from_pretrained(write_folder(tmp_path / "source", theirs()), dtype=torch.float32)
    (tmp_path / "out" / ".incoming").mkdir(parents=True)  # of a process that was killed
    (tmp_path / "out" / "notes.txt").touch()
    for format, size, want in (
        (
            "hf",
            "20KB",
            {f"model-{place:05d}-of-00004.safetensors" for place in range(1, 5)}
            | {"model.safetensors.index.json"},
        ),
        ("hf", "5GB", {"model.safetensors"}),
        ("model_center", "5GB", {"pytorch_model.pt"}),
        ("hf", "5GB", {"model.safetensors"}),
    ):
        model.save_pretrained(tmp_path / "out", format, size)
        assert set(os.listdir(tmp_path / "out")) == want | {"config.json", "notes.txt"}


def save_pair(format: str, folder: pathlib.Path, config: dict[str, Any]) -> None:
    if format == "hf":
        save_hugging_face(Pair(), folder, PAIR, config)
    else:
        save_model_center(Pair(), folder, config)


@pytest.mark.parametrize("format", ["hf", "model_center"])
def test_places_and_configurations_that_cannot_be_written(
    tmp_path: pathlib.Path, format: str
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(WeightsError, match="cannot save to the folder"):
        save_pair(format, tmp_path / "file", {})
    with pytest.raises(WeightsError, match="not JSON serializable"):
        save_pair(format, tmp_path / "new" / "folder", {"kind": torch.half})
    assert os.listdir(tmp_path) == ["file"]


class Tokenizer:
    def save_pretrained(self, folder: pathlib.Path) -> None:
        (pathlib.Path(folder) / "vocab.txt").write_text("a")


def test_a_tokenizer_comes_along(tmp_path: pathlib.Path) -> None:
    model = GPT2(GPT2Config.from_dict(CONFIG))
    for format in ("hf", "model_center"):
        model.save_pretrained(tmp_path / format, format, tokenizer=Tokenizer())
        assert (tmp_path / format / "vocab.txt").read_text() == "a"


def bytes_read() -> int:
    """What this process has read by system calls so far."""
    return int(pathlib.Path("/proc/self/io").read_text().split()[1])


class Wide(torch.nn.Module):
    """Matrices of a mebibyte."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(512, 512, bias=False) for _ in range(4))


WIDE = KeyMap(
    {
        f"layers.{place}.weight": Piece("fused", rows=(512 * place, 512 * (place + 1)))
        for place in range(4)
    }
)


def read_wide(folder: str) -> tuple[int, State]:
    model = bmt.BMTrainModelWrapper(Wide())
    load_weights(model, folder, WIDE)
    before = bytes_read()
    load_weights(model, folder, WIDE)
    return bytes_read() - before, state_of(model)


@pytest.mark.skipif(
    not pathlib.Path("/proc/self/io").exists(), reason="bytes are counted as Linux shows them"
)
def test_every_rank_reads_only_its_own_bytes(tmp_path: pathlib.Path) -> None:
    fused = torch.randn(2048, 512)
    safetensors.torch.save_file({"fused": fused}, tmp_path / "model.safetensors")
    for num_ranks in (1, 2, 4):
        for count, state in run_ranks(read_wide, num_ranks, str(tmp_path)):
            assert count < fused.nbytes / num_ranks + 20_000
            assert torch.equal(torch.cat(list(state.values())), fused)


def test_the_source_folder_is_not_needed_afterwards(tmp_path: pathlib.Path) -> None:
    """Values are copies: nothing maps the files any more."""
    tensors = theirs()
    model = GPT2.from_pretrained(write_folder(tmp_path / "a", tensors), dtype=torch.float32)
    for file in (tmp_path / "a").iterdir():
        file.write_bytes(b"")
    shutil.rmtree(tmp_path / "a")
    assert_same(state_of(model), ours(tensors))


def fast_tokenizer(folder: pathlib.Path, cuts: bool) -> PreTrainedTokenizerFast:
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    if cuts:
        backend.enable_truncation(7, stride=1)
    PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="b").save_pretrained(folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


def test_a_tokenizer_is_written_as_it_was_loaded(tmp_path: pathlib.Path) -> None:
    """However it has been used, and it can be used as before; a file that says how texts are cut
    goes on saying so.
    """
    model = GPT2(GPT2Config.from_dict(CONFIG))
    tokenizer = fast_tokenizer(tmp_path / "plain", cuts=False)
    model.save_pretrained(tmp_path / "out", tokenizer=tokenizer)
    unused = (tmp_path / "out" / "tokenizer.json").read_bytes()
    tokenizer("a b a", truncation=True, max_length=2, padding="max_length")
    before = tokenizer.backend_tokenizer.truncation, tokenizer.backend_tokenizer.padding
    model.save_pretrained(tmp_path / "out", tokenizer=tokenizer)
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == unused
    assert None not in before
    assert before == (tokenizer.backend_tokenizer.truncation, tokenizer.backend_tokenizer.padding)
    model.save_pretrained(tmp_path / "cut", tokenizer=fast_tokenizer(tmp_path / "cuts", cuts=True))
    written = json.loads((tmp_path / "cut" / "tokenizer.json").read_text())
    assert written["truncation"]["max_length"] == 7
