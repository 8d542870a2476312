"""Forecasts against what real models keep, and what is refused."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import pathlib
import re
import sys
import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from tests.ranks.runner import run_ranks
from torch import nn

import bmtrain as bmt
import bmtrain.plan as bp
from bmtrain.__main__ import COMMANDS, main
from bmtrain.errors import ConfigurationError
from bmtrain.loss import linear_cross_entropy
from bmtrain.optim.adam import AdamOptimizer
from bmtrain.optim.form import MASTER_WEIGHTS, MOMENTS
from bmtrain.optim.offload import AdamOffloadOptimizer
from bmtrain.plan.blocks import costs
from bmtrain.plan.environment import collect, masked
from bmtrain.plan.measured import Comparison, line
from bmtrain.plan.outline import groups_of, without_values
from bmtrain.plan.reference import Decoder, Layer, Sizes
from bmtrain.plan.search import nearest, with_smaller_states
from bmtrain.plan.settings import DTYPES, Settings
from bmtrain.plan.sources import of_function, of_sizes, of_transformers
from bmtrain.plan.step import Memory, shard_of
from bmtrain.recompute.level import Level, Selective
from bmtrain.recompute.runner import call
from bmtrain.shard.parameter import DistributedParameter
from bmtrain.shard.slices import local_of
from bmtrain.torch_internals import without_memory
from model_center import arguments
from model_center.__main__ import main as model_center_main
from model_center.commands import plan as model_center_plan
from model_center.commands import train as train_command

ROOT = pathlib.Path(__file__).resolve().parents[2]

SIZES = Sizes(layers=3, hidden=64, heads=4, kv_heads=2, vocab=160, ff=96)
GPT = Sizes(layers=2, hidden=48, heads=4, vocab=96, gated=False)
MACHINE = bp.Machine(gpu="h200")
EAGER = Settings(batch=2, seq=16, compiled=False, recompute="nothing")


class Counter(torch.autograd.graph.saved_tensors_hooks):
    """Bytes that autograd saves of real tensors: each address once, without some."""

    def __init__(self, spare: list[torch.Tensor]) -> None:
        super().__init__(self.pack, lambda saved: saved)
        self.seen = {x.untyped_storage().data_ptr() for x in spare}
        self.num_bytes = 0

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        address = x.untyped_storage().data_ptr()
        if address not in self.seen:
            self.seen.add(address)
            self.num_bytes += x.untyped_storage().nbytes()
        return x


@pytest.mark.parametrize("sizes", [SIZES, GPT], ids=["gated", "plain"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_are_those_of_a_real_run(sizes: Sizes, dtype: torch.dtype) -> None:
    """At NOTHING what autograd saves, at CHEAP what the engine's own code keeps, to the byte."""
    torch.manual_seed(0)
    layer = Layer(sizes).to(dtype)
    half = sizes.hidden // sizes.heads // 2
    x, turns = torch.randn(2, 16, sizes.hidden, dtype=dtype), torch.randn(2, 16, half)
    x.requires_grad_()
    counter = Counter([*layer.parameters(), turns])
    with counter:
        layer(x, turns)
    cheap = Selective(call)
    with torch.no_grad():
        cheap(layer, (x, turns), {})
    with without_memory():
        other = without_values(Layer(sizes), dtype)
        fake = torch.empty(2, 16, sizes.hidden, dtype=dtype, requires_grad=True)
        shared = torch.empty(2, 16, half)
        found = costs(other, (fake, shared), {}, [shared], compiled=False, in_fp8=False)
    assert found.levels[Level.NOTHING].kept == counter.num_bytes
    assert found.levels[Level.CHEAP].kept == x.nbytes + cheap.num_bytes()
    assert found.levels[Level.BLOCK].kept == x.nbytes
    assert found.levels[Level.OFFLOADED].kept == 0


def test_compiled_keeps_what_the_compiler_splits_off() -> None:
    """A gated block: no more than eager, no less than its products need; forward is cheaper."""
    with without_memory():
        layer = without_values(Layer(SIZES), torch.bfloat16)
        x = torch.empty(2, 16, 64, dtype=torch.bfloat16, requires_grad=True)
        turns = torch.empty(2, 16, 8)
        found = costs(layer, (x, turns), {}, [turns], compiled=True, in_fp8=False)
        eager = costs(layer, (x, turns), {}, [turns], compiled=False, in_fp8=False)
    assert found.reason == ""
    kept = {level: cost.kept for level, cost in found.levels.items()}
    assert kept[Level.BLOCK] < kept[Level.CHEAP] < kept[Level.NOTHING]
    assert kept[Level.NOTHING] < eager.levels[Level.NOTHING].kept
    # Operands of the seven products: norms, attention's, gate, up and their product.
    assert kept[Level.NOTHING] >= 2 * 16 * 2 * (64 * 3 + 64 * 2 + 96 * 3)


class Head(nn.Module):
    """A map to logits and their loss, as programs write it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 4096, bias=False)

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = self.linear(x).float().flatten(0, 1)
        return F.cross_entropy(logits, targets.flatten())


def test_a_head_in_a_block_runs_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled, at every level: the logits of a chunk, and gradients in fp32 and in bf16."""
    monkeypatch.setattr(linear_cross_entropy, "CHUNK_ROWS", 256)
    monkeypatch.setattr(linear_cross_entropy, "CHUNK_BYTES", 0)
    with without_memory():
        head = without_values(Head(), torch.bfloat16)
        x = torch.empty(4, 512, 64, dtype=torch.bfloat16, requires_grad=True)
        targets = torch.zeros(4, 512, dtype=torch.long)
        found = costs(head, (x, targets), {}, [], compiled=True, in_fp8=False)
        eager = costs(head, (x, targets), {}, [], compiled=False, in_fp8=False)
    all_logits = 2048 * 4096 * 2
    chunk, gradients = all_logits // 8, (4096 * 64 + 2048 * 64) * (4 + 2)
    rows = x.nbytes + targets.nbytes + 8 * 2048 * 4  # and some numbers for each
    for level in (Level.NOTHING, Level.CHEAP, Level.BLOCK):
        cost, plain = found.levels[level], eager.levels[level]
        assert max(cost.forward, cost.backward) <= chunk + gradients + 2 * rows < all_logits
        assert plain.backward >= 3 * all_logits
    assert found.levels[Level.BLOCK].kept == x.nbytes + targets.nbytes


# Settings that decide what an optimizer keeps. GPT has vectors that are no whole blocks of moments.
KEPT: list[dict[str, Any]] = [
    {"dtype": "fp32"},
    {"dtype": "bf16"},
    {"dtype": "fp16", "moments": "8bit"},
    {"dtype": "fp32", "moments": "8bit", "master_weights": "split"},
    {"dtype": "bf16", "moments": "8bit"},
    {"dtype": "bf16", "master_weights": "split"},
    {"dtype": "bf16", "master_weights": "none"},
    {"dtype": "bf16", "moments": "8bit", "master_weights": "split"},
    {"dtype": "bf16", "optimizer": "offload"},
    {"dtype": "fp32", "optimizer": "offload"},
    {"dtype": "bf16", "optimizer": "offload", "moments": "8bit"},
    {"dtype": "bf16", "optimizer": "offload", "master_weights": "split"},
    {"dtype": "bf16", "optimizer": "offload", "moments": "8bit", "master_weights": "none"},
]


def all_built() -> list[dict[str, int]]:
    """Bytes of really sharded models on this rank: shards, gradients, states."""
    return [built(**kept) for kept in KEPT]


def built(dtype: str, optimizer: str = "adam", **form: str) -> dict[str, int]:
    torch.manual_seed(0)
    model = bmt.BMTrainModelWrapper(Decoder(GPT, False).to(DTYPES[dtype]))
    kind: Any = {"adam": AdamOptimizer, "offload": AdamOffloadOptimizer}[optimizer]
    adam = kind(model.parameters(), lr=1e-3, **form)
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(adam)
    ids = torch.zeros(2, 16, dtype=torch.long)
    manager.backward(model(ids, ids))
    manager.step()
    storages = {p.storage_of for p in model.parameters() if isinstance(p, DistributedParameter)}
    flat = [storage.gradient.flat for storage in storages]
    # Views of flat tensors: the states of a run lie in one.
    states = {
        local_of(x).untyped_storage().data_ptr(): local_of(x).untyped_storage().nbytes()
        for state in adam.state.values()
        for x in state.values()
        if isinstance(x, torch.Tensor)
    }
    return {
        "weights": sum(storage.shard.nbytes for storage in storages),
        "gradients": sum(x.nbytes for x in flat if x is not None),
        "states": sum(states.values()),
    }


@pytest.mark.parametrize("ranks", [1, 2])
def test_shards_gradients_and_states_are_those_of_a_real_model(ranks: int) -> None:
    """To the byte, on each number of ranks: here those of the first rank."""
    found = run_ranks(all_built, ranks)[0]
    forecaster, machine = bp.Forecaster(of_sizes(GPT)), bp.Machine(gpu="h200", gpus=ranks)
    for kept, real in zip(KEPT, found, strict=True):
        settings = Settings(**{**vars(EAGER), **kept})
        traced, _ = forecaster.outline(settings)
        memory = Memory(traced, settings, machine)
        assert memory.weights == real["weights"], kept
        assert memory.gradients == real["gradients"], kept
        places = (0, real["states"]) if "optimizer" in kept else (real["states"], 0)
        assert (memory.states, memory.host) == places, kept


def test_states_are_on_the_gpu_and_in_host_memory() -> None:
    """As many as are said to be on the GPU; a hidden update takes copies of gradients besides."""
    forecaster, machine = bp.Forecaster(of_sizes(GPT)), bp.Machine(gpu="h200")
    away = dataclasses.replace(EAGER, optimizer="offload")
    traced, _ = forecaster.outline(away)
    whole = Memory(traced, away, machine)
    half = dataclasses.replace(away, device_states=whole.host / 2 / 2**30)
    part = Memory(traced, half, machine)
    assert part.states == whole.host - part.host == whole.host // 2
    assert whole.copied == whole.gradients and part.copied == whole.gradients // 2
    assert Memory(traced, dataclasses.replace(away, overlap=False), machine).copied == 0
    everything = Memory(traced, dataclasses.replace(away, device_states=1.0), machine)
    assert (everything.host, everything.staged, everything.copied) == (0, 0, 0)
    levels = whole.whole_levels(Level.BLOCK)
    update = {m.name: m for m in whole.moments(levels)}["update"]
    assert update.parts["states that pass through"] == whole.staged + whole.copied


def test_copies_of_gradients_take_the_room_that_is_left() -> None:
    """Where not all updates can be hidden, those are that have room, and the rest takes its time."""
    forecaster = bp.Forecaster(of_sizes(Sizes(layers=8, hidden=1024, heads=8, vocab=4000)))
    away = Settings(optimizer="offload", recompute="block", batch=1, seq=64, compiled=False)
    whole = forecaster(away, bp.Machine(gpu="h200"))
    shown = dataclasses.replace(away, overlap=False)
    least = forecaster(shown, bp.Machine(gpu="h200"))
    traced, _ = forecaster.outline(away)

    def memory(size: int) -> tuple[Memory, bp.Forecast]:
        machine = bp.Machine(gpu="h200", gpu_memory=size / 0.97 / 2**30)
        return Memory(traced, away, machine), forecaster(away, machine)

    assert whole.seconds is not None and least.seconds is not None
    sizes = range(least.peak.total + 2**20, whole.peak.total, 2**25)
    assert len(sizes) > 2
    for size in sizes:
        own, found = memory(size)
        assert found.fits and found.seconds is not None
        assert 0 <= own.copied < own.gradients and own.hidden == own.copied / own.gradients
        assert size - own.moments(own.whole_levels(Level.BLOCK))[-1].total < 2**25
        assert whole.seconds.update <= found.seconds.update <= least.seconds.update
    assert memory(whole.peak.total + 2**26)[0].hidden == 1


def test_the_nearest_that_fits_places_states(capsys: pytest.CaptureFixture[str]) -> None:
    """Where the host has no room for all of them, the GPU gets the rest."""
    sizes = ["--layers=8", "--hidden=1024", "--heads=8", "--vocab=4000", "--ff=4096"]
    words = ["plan", *sizes, "--gpu-memory=8", "--no-compile", "--optimizer=offload"]
    assert main([*words, "--host-memory=64", "--brief"]) == 0
    capsys.readouterr()
    assert main([*words, "--host-memory=9"]) == 1
    said = capsys.readouterr().out
    found = re.search(r"the nearest that does: .*--device-states ([\d.]+)", said)
    assert found is not None, said
    flags = ["--recompute=block", f"--device-states={found[1]}", "--host-memory=9", "--brief"]
    assert main([*words, *flags]) == 0, said


def test_memory_grows_with_what_takes_it() -> None:
    """More rows, less recomputation, fewer ranks: each takes more; ZeRO-2 more than ZeRO-3."""
    forecaster = bp.Forecaster(of_sizes(SIZES))
    two = bp.Machine(gpu="h200", gpus=2)

    def total(machine: bp.Machine = two, **changes: Any) -> int:
        wide = {"batch": 32, "seq": 64}
        settings = Settings(**{**vars(EAGER), **wide, **changes})
        return forecaster(settings, machine).peak.tensors

    assert total(batch=64) > total()
    assert total(recompute="block") < total(recompute="cheap") <= total()
    assert total(MACHINE) != total()
    assert total(zero_level=2) >= total()


def test_auto_takes_what_fits() -> None:
    """With room everything is kept; with less, what is chosen fits as long as anything does."""
    forecaster = bp.Forecaster(of_sizes(Sizes(layers=6, hidden=512, heads=8, vocab=512)))
    settings = Settings(batch=8, seq=512, compiled=False)
    free = forecaster(settings, MACHINE)
    assert free.fits and set(free.recompute) == {"nothing"}
    least = forecaster(Settings(**{**vars(settings), "recompute": "block"}), MACHINE)
    between = (free.peak.total + least.peak.total) / 2 / 0.97 / 2**30
    tight = forecaster(settings, bp.Machine(gpu_memory=between))
    assert tight.fits and len(tight.recompute) > 1
    assert tight.tokens_per_second is None  # the speed of a GPU that has only a size is not known
    assert not forecaster(settings, bp.Machine(gpu_memory=1.0)).fits


def test_auto_fits_where_the_least_does() -> None:
    """For many rooms; the allocator's slack grows with what blocks keep, which no plan counts."""
    sizes = Sizes(layers=6, hidden=4096, heads=32, vocab=512)
    settings = Settings(batch=64, seq=4096, compiled=False)
    traced, _ = bp.Forecaster(of_sizes(sizes)).outline(settings)
    memory = Memory(traced, settings, MACHINE)
    ends = [memory.peak(memory.levels(room)).total for room in (0, 2**50)]
    for part in range(201):
        room = ends[0] + (ends[1] - ends[0]) * part // 200
        found = memory.peak(memory.levels(room))
        assert found.total <= room
        assert found.total > room - 2 * (ends[1] - ends[0]) / 6, "much more would have fit"


def test_smaller_states_are_proposed_where_exact_ones_do_not_fit() -> None:
    """The form with most bits that fits, beside what fits exactly; none where that is as good."""
    forecaster = bp.Forecaster(
        of_sizes(Sizes(layers=2, hidden=4096, heads=32, vocab=512)), every_level=False
    )
    settings = Settings(batch=2, seq=16, compiled=False)

    def found(gib: float, wanted: Settings = settings, host: float = 9.0) -> Settings | None:
        machine = bp.Machine(gpu_memory=gib, host_memory=host)
        exact = nearest(forecaster, wanted, machine)
        proposed = with_smaller_states(forecaster, wanted, machine, exact)
        assert proposed is None or proposed.fits
        return None if proposed is None else proposed.settings

    def needed(**form: str) -> float:
        own = Settings(**{**vars(settings), **form, "recompute": "block"})
        return forecaster(own, MACHINE).peak.total / 0.97 / 2**30 + 0.01

    forms = [
        {"master_weights": "split"},
        {"moments": "8bit"},
        {"moments": "8bit", "master_weights": "split"},
    ]
    sizes = [needed(), *(needed(**form) for form in forms)]
    assert sizes == sorted(sizes, reverse=True)
    assert found(sizes[0]) is None  # fits as it is
    for size, form in zip(sizes[1:], forms, strict=True):
        chosen = found(size)
        assert chosen is not None and chosen.batch == settings.batch
        want = {"moments": "fp32", "master_weights": "fp32", **form}
        assert {name: vars(chosen)[name] for name in want} == want and chosen.optimizer == "adam"
    assert found(sizes[3] - 0.3) is None and found(0.5, host=64.0) is None
    # The same forms on the host; in fp16 there is no split.
    few = found(sizes[3] - 0.3, Settings(**{**vars(settings), "optimizer": "offload"}), host=12.0)
    assert few is not None and (few.moments, few.master_weights) == ("fp32", "split")
    half = found(sizes[2], Settings(**{**vars(settings), "dtype": "fp16"}))
    assert half is not None and half.master_weights == "fp32" and half.moments == "8bit"
    assert found(sizes[2], Settings(**{**vars(settings), "optimizer": "torch"})) is None


def test_the_update_moves_less(capsys: pytest.CaptureFixture[str]) -> None:
    """Time of the update by the bytes that it reads and writes; the flags say all of it."""
    words = ["plan", "--layers=2", "--hidden=64", "--heads=4", "--vocab=96", "--gpu=h200"]
    words += ["--brief", "--json", "--no-compile"]
    times = []
    for flags in ([], ["--moments=8bit", "--master-weights=split"]):
        assert main([*words, *flags]) == 0
        times.append(json.loads(capsys.readouterr().out))
    exact, small = (one["parts"]["optimizer states"] / one["parameters"] for one in times)
    assert exact == pytest.approx(12, rel=1e-3) and small == pytest.approx(4.125, rel=1e-3)
    assert times[1]["step_seconds"] < times[0]["step_seconds"]
    assert times[1]["settings"]["moments"] == "8bit"


def test_forms_have_the_same_names_everywhere() -> None:
    """Of the optimizer, the plan and the flags of training."""
    assert arguments.MOMENTS == MOMENTS and arguments.MASTER_WEIGHTS == MASTER_WEIGHTS


def test_lora_trains_the_adapters_alone() -> None:
    """Elements by hand: rank times the sum of both sides of the seven linear layers, per block."""
    found = bp.Forecaster(of_sizes(SIZES))(Settings(**{**vars(EAGER), "lora": 4}), MACHINE)
    sides = [(64, 64), (64, 32), (64, 32), (64, 64), (64, 96), (64, 96), (96, 64)]
    assert found.trained == 3 * 4 * sum(a + b for a, b in sides)
    assert found.peak.parts["optimizer states"] < 12 * found.parameters


class Plain(nn.Module):
    """A user's model: ids to logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.head = nn.Linear(32, 50)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x).relu()
        out: torch.Tensor = self.head(x)
        return out


def model() -> nn.Module:
    """For `module:function`."""
    return Plain()


def number() -> int:
    """No module."""
    return 3


def test_a_function_of_the_users() -> None:
    """Its blocks are the members of the list."""
    forecaster = bp.Forecaster(of_function(f"{__name__}:model"))
    traced, notes = forecaster.outline(EAGER)
    assert len(traced.calls) == 3 and not notes
    params = list(Plain().layers[0].named_parameters())
    assert shard_of(groups_of(params)[0], 1).numel >= 32 * 33


def test_models_by_their_folder(tmp_path: pathlib.Path) -> None:
    """A folder of transformers, as the model of transformers and as ours: the same elements."""
    config = transformers.LlamaConfig(
        num_hidden_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=96,
        vocab_size=128,
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(tmp_path)
    real = sum(p.numel() for p in transformers.LlamaForCausalLM(config).parameters())
    for source in (of_transformers(str(tmp_path)), model_center_plan.source_of(str(tmp_path))):
        forecaster = bp.Forecaster(source, every_level=False)
        found = forecaster(EAGER, MACHINE)
        assert found.parameters == real
        assert found.recompute == {"nothing": 2}
        assert found.activations["nothing"] > 2 * 2 * 16 * 64 * 2


PLAIN = (f"{__name__}:model", "--gpu", "h200")
REFUSED = {
    "no model": ["--gpu", "h200"],
    "no gpu": [f"{__name__}:model"],
    "no such module": ["nowhere_at_all:model", "--gpu", "h200"],
    "no such function": [f"{__name__}:nothing", "--gpu", "h200"],
    "no module returned": [f"{__name__}:number", "--gpu", "h200"],
    "no such folder": ["./no/such/folder", "--gpu", "h200"],
    "sizes missing": ["--layers", "3", "--gpu", "h200"],
    "negative": ["--layers=-3", "--hidden=64", "--heads=4", "--vocab=10", "--gpu", "h200"],
    "heads": ["--layers=3", "--hidden=64", "--heads=5", "--vocab=10", "--gpu", "h200"],
    "batch": [f"{__name__}:model", "--gpu", "h200", "--batch", "0"],
    "tokens": [f"{__name__}:model", "--gpu", "h200", "--tokens=-1"],
    "tp": [f"{__name__}:model", "--gpu", "h200", "--tp-size", "2"],
    "8 bits of torch's": [*PLAIN, "--optimizer", "torch", "--moments", "8bit"],
    "negative states": [*PLAIN, "--optimizer", "offload", "--device-states=-1"],
    "no masters of fp16": [*PLAIN, "--dtype", "fp16", "--master-weights", "none"],
    "memory": [f"{__name__}:model", "--gpu-memory=-2"],
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_ends_in_one_line(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit status 2, and a line that says what is wrong."""
    assert main(["plan", *REFUSED[case]]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("error: ") and said.err.count("\n") == 1


def test_a_model_that_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A name without a network, for example: what to give in its place is said."""

    def refuse(name: str) -> None:
        raise OSError(f"no connection to read {name}")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", refuse)
    assert main(["plan", "somebody/model", "--gpu", "h200"]) == 2
    said = capsys.readouterr().err
    assert "no connection to read somebody/model" in said
    assert "Name a folder that has one, or give sizes (--layers" in said


def test_without_transformers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder of theirs needs the package, and the line says so."""
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["plan", str(tmp_path), "--gpu", "h200"]) == 2
    assert "needs the package transformers" in capsys.readouterr().err


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    """Text and JSON, for what fits and what does not, which has another exit status."""
    words = ["plan", f"{__name__}:model", "--no-compile", "--tokens", "1e9"]
    assert main([*words, "--gpu", "h200"]) == 0
    said = capsys.readouterr().out
    assert "fits." in said and "hours for 1,000,000,000 tokens" in said
    assert main([*words, "--gpu-memory", "0.5", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] is False and found["peak_bytes"] == sum(found["parts"].values())
    assert found["smaller_states"] is None
    wide = ["plan", "--layers=2", "--hidden=4096", "--heads=32", "--vocab=512", "--no-compile"]
    assert main([*wide, "--gpu-memory", "6", "--host-memory", "9", "--seq", "16"]) == 1
    said = capsys.readouterr().out
    assert "guides/precision): --moments 8bit (" in said and "nothing near fits" not in said


def test_the_list_of_commands(capsys: pytest.CaptureFixture[str]) -> None:
    """One line each; of an unknown one, the nearest."""
    assert main([]) == 0
    listed = capsys.readouterr().out
    assert all(f"\n  {name} " in listed for name in COMMANDS)
    assert main(["pln"]) == 2
    assert "'plan'" in capsys.readouterr().err


def test_env_masks_secrets_and_survives_what_it_cannot_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Values of tokens and keys are not shown; items that fail say why."""
    monkeypatch.setenv("HF_TOKEN", "geheim1")
    monkeypatch.setenv("WANDB_API_KEY", "geheim2")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("PATH", "")  # no compiler, no nvidia-smi
    found = collect()
    assert found["variables"]["NCCL_DEBUG"] == "INFO"
    assert found["topology"].startswith("not known (")
    assert main(["env", "--json"]) == 0
    shown = capsys.readouterr().out
    assert "geheim" not in shown and json.loads(shown)["packages"]["torch"]
    assert masked({"HF_ENDPOINT": "https://me:pw@host"}) == {"HF_ENDPOINT": "https://***@host"}


def test_forecast_beside_measured() -> None:
    """The line that training prints once."""
    assert line(int(61.2 * 2**30), 62 * 2**30) == "memory: 61.2 GiB forecast, 62.0 measured (+1.3%)"


def waited(words: list[str]) -> str:
    """What a comparison says; it says so once."""
    comparison, said = Comparison(words), None
    while said is None:
        said = comparison.said(2 * 2**30)
        time.sleep(0.05)
    assert comparison.said(2 * 2**30) is None
    return said


def test_a_run_compares_itself(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what a process of its own prints; if that fails, the reason. It can be ended early."""
    (tmp_path / "forecasting.py").write_text("print('{\"peak_bytes\": 1073741824}')")
    (tmp_path / "endless.py").write_text("import time; time.sleep(600)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert waited(["forecasting"]) == "memory: 1.0 GiB forecast, 2.0 measured (+100.0%)"
    assert "2.0 GiB in use; no forecast: " in waited(["missing_module_of_this_test"])
    comparison = Comparison(["endless"])
    assert comparison.said(1) is None
    comparison.close()


def test_programs_ask_for_their_own_forecast(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The words that the GPT-2 example has for it are understood, and describe its model."""
    folder = ROOT / "examples" / "gpt2"
    monkeypatch.syspath_prepend(str(folder))
    for name in {path.stem for path in folder.iterdir()} & set(sys.modules):
        monkeypatch.delitem(sys.modules, name)
    train, options = importlib.import_module("train"), importlib.import_module("options")
    small = ["--moments", "8bit", "--master-weights", "split"]
    chosen = options.parse_options(
        ["--preset", "gpt2", "--layers", "2", "--compile", *small], "cuda"
    )
    package, *words = train.forecast_words(chosen)
    machine = [
        "--gpu-memory",
        "80",
        "--gpus",
        "2",
        "--hosts",
        "1",
        "--brief",
        "--json",
        "--no-compile",
    ]
    assert package == "bmtrain" and main([*words, *machine]) == 0
    width, layers = 768, 2
    table = chosen.vocab_size * width  # the reference has none of positions
    found = json.loads(capsys.readouterr().out)
    assert found["parameters"] == pytest.approx(
        table + layers * (12 * width**2 + 13 * width) + 2 * width, rel=0.001
    )
    assert found["settings"]["moments"] == "8bit" and found["settings"]["master_weights"] == "split"
    parser = argparse.ArgumentParser()
    train_command.add_arguments(parser)
    args = parser.parse_args(["--model-config", "folder", "--data", "x", "--lora-rank", "8"])
    package, *words = model_center_plan.words_of(args)
    assert package == "model_center" and model_center_main([*words, *machine]) != 0
    assert "unrecognized" not in (said := capsys.readouterr().err) and "folder" in said
    for name, module in list(sys.modules.items()):  # other tests have modules of these names
        if str(folder) in str(getattr(module, "__file__", "")):
            monkeypatch.delitem(sys.modules, name)


def test_the_function() -> None:
    """`bmtrain.plan.forecast` of a model and a loss."""

    def loss(module: nn.Module, batch: int, seq: int) -> torch.Tensor:
        out: torch.Tensor = module(torch.zeros(batch, seq, dtype=torch.long))
        return out.float().mean()

    found = bp.forecast(Plain, loss, EAGER)
    assert found.fits and found.parameters == sum(p.numel() for p in Plain().parameters())
    with pytest.raises(ConfigurationError, match="nearest: 'h100'"):
        bp.Machine(gpu="h10")
    with pytest.raises(ConfigurationError, match="10 goes with optimizer offload, got adam"):
        dataclasses.replace(EAGER, device_states=10.0)
    with pytest.raises(ConfigurationError, match="expected optimizer offload with it, got adam"):
        dataclasses.replace(EAGER, overlap=False)
