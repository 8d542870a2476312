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
from tests.modules import importable
from tests.ranks.runner import run_ranks
from torch import Tensor, nn

import bmtrain as bmt
import bmtrain.plan as bp
from bmtrain.__main__ import COMMANDS, main
from bmtrain.errors import ConfigurationError
from bmtrain.loss import linear_cross_entropy
from bmtrain.optim.form import MASTER_WEIGHTS, MOMENTS
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
GIB = 2**30
SIZES = Sizes(layers=3, hidden=64, heads=4, kv_heads=2, vocab=160, ff=96)
GPT = Sizes(layers=2, hidden=48, heads=4, vocab=96, gated=False)
MACHINE = bp.Machine(gpu="h200")
EAGER = Settings(batch=2, seq=16, compiled=False, recompute="nothing")
with_replaced: Any = dataclasses.replace  # fields by their names


class Counter(torch.autograd.graph.saved_tensors_hooks):
    """Bytes that autograd saves of real tensors: each address once, without some."""

    def __init__(self, spare: list[Tensor]) -> None:
        super().__init__(self.pack, lambda saved: saved)
        self.seen = {x.untyped_storage().data_ptr() for x in spare}
        self.num_bytes = 0

    def pack(self, x: Tensor) -> Tensor:
        address = x.untyped_storage().data_ptr()
        if address not in self.seen:
            self.seen.add(address)
            self.num_bytes += x.untyped_storage().nbytes()
        return x


@pytest.mark.parametrize(
    ("sizes", "dtype"), [(SIZES, torch.bfloat16), (GPT, torch.float32)], ids=["gated", "plain"]
)
def test_activations_are_those_of_a_real_run(sizes: Sizes, dtype: torch.dtype) -> None:
    """At NOTHING what autograd saves, at CHEAP what the engine's own code keeps, to the byte. Compiled,
    no more than eager, and no less than the products need; forward is cheaper.
    """
    layer, shape = Layer(sizes).to(dtype), (2, 16, sizes.hidden)
    half = sizes.hidden // sizes.heads // 2
    x, turns = torch.randn(shape, dtype=dtype), torch.randn(2, 16, half)
    x.requires_grad_()
    counter = Counter([*layer.parameters(), turns])
    with counter:
        layer(x, turns)
    cheap = Selective(call)
    with torch.no_grad():
        cheap(layer, (x, turns), {})
    kept = []
    with without_memory():
        for compiled in (False, True):
            fake, shared = (
                torch.empty(shape, dtype=dtype, requires_grad=True),
                torch.empty(2, 16, half),
            )
            other = without_values(Layer(sizes), dtype)
            found = costs(other, (fake, shared), {}, [shared], compiled=compiled, in_fp8=False)
            kept.append({level: cost.kept for level, cost in found.levels.items()})
    eager, compiled_kept = kept
    assert eager[Level.NOTHING] == counter.num_bytes
    assert eager[Level.CHEAP] == x.nbytes + cheap.num_bytes()
    assert eager[Level.BLOCK] == x.nbytes and eager[Level.OFFLOADED] == 0
    if sizes is SIZES:
        levels = [compiled_kept[level] for level in (Level.BLOCK, Level.CHEAP, Level.NOTHING)]
        assert found.reason == "" and levels[0] < levels[1] < levels[2] < eager[Level.NOTHING]
        # operands of the seven products: norms, attention's, gate, up and their product
        assert levels[2] >= 2 * 16 * 2 * (64 * 3 + 64 * 2 + 96 * 3)


class Head(nn.Module):
    """A map to logits and their loss, as programs write it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 4096, bias=False)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
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
        found, eager = (
            costs(head, (x, targets), {}, [], compiled=compiled, in_fp8=False).levels
            for compiled in (True, False)
        )
    all_logits = 2048 * 4096 * 2
    chunk, gradients = all_logits // 8, (4096 * 64 + 2048 * 64) * (4 + 2)
    rows = x.nbytes + targets.nbytes + 8 * 2048 * 4  # and some numbers for each
    for level in (Level.NOTHING, Level.CHEAP, Level.BLOCK):
        most = max(found[level].forward, found[level].backward)
        assert most <= chunk + gradients + 2 * rows < all_logits
        assert eager[level].backward >= 3 * all_logits
    assert found[Level.BLOCK].kept == x.nbytes + targets.nbytes


# Settings that decide what an optimizer keeps. GPT has vectors that are no whole blocks of moments.
KEPT = [
    dict(word.split("=") for word in line.split())
    for line in """
dtype=fp32
dtype=fp16 moments=8bit
dtype=fp32 moments=8bit master_weights=split
dtype=bf16 master_weights=split
dtype=bf16 master_weights=none
dtype=bf16 moments=8bit master_weights=split
dtype=bf16 optimizer=offload
dtype=fp32 optimizer=offload moments=8bit
dtype=bf16 optimizer=offload moments=8bit master_weights=none
""".strip().splitlines()
]


def built() -> list[dict[str, int]]:
    """Bytes of really sharded models on this rank: shards, gradients, states."""
    found = []
    for dtype, kind, form in ((x["dtype"], x.get("optimizer"), x) for x in KEPT):
        model = bmt.BMTrainModelWrapper(Decoder(GPT, False).to(DTYPES[dtype]))
        adam: Any = bmt.optim.AdamOffloadOptimizer if kind else bmt.optim.AdamOptimizer
        states = {name: form[name] for name in ("moments", "master_weights") if name in form}
        optimizer, manager = adam(model.parameters(), lr=1e-3, **states), bmt.optim.OptimManager()
        manager.add_optimizer(optimizer)
        ids = torch.zeros(2, 16, dtype=torch.long)
        manager.backward(model(ids, ids))
        manager.step()
        storages = {p.storage_of for p in model.parameters() if isinstance(p, DistributedParameter)}
        flat = [storage.gradient.flat for storage in storages]
        # Views of flat tensors: the states of a run lie in one.
        memory = {
            local_of(x).untyped_storage().data_ptr(): local_of(x).untyped_storage().nbytes()
            for state in optimizer.state.values()
            for x in state.values()
            if isinstance(x, Tensor)
        }
        found.append(
            {
                "weights": sum(storage.shard.nbytes for storage in storages),
                "gradients": sum(x.nbytes for x in flat if x is not None),
                "states": sum(memory.values()),
            }
        )
    return found


def test_shards_gradients_and_states_are_those_of_a_real_model() -> None:
    """To the byte: those of the first rank."""
    forecaster, machine = bp.Forecaster(of_sizes(GPT)), bp.Machine(gpu="h200", gpus=2)
    for kept, real in zip(KEPT, run_ranks(built, 2)[0], strict=True):
        settings = with_replaced(EAGER, **kept)
        memory = Memory(forecaster.outline(settings)[0], settings, machine)
        assert memory.weights == real["weights"], kept
        assert memory.gradients == real["gradients"], kept
        places = (0, real["states"]) if "optimizer" in kept else (real["states"], 0)
        assert (memory.states, memory.host) == places, kept


def test_states_are_on_the_gpu_and_in_host_memory() -> None:
    """As many as are said to be on the GPU; a hidden update takes copies of gradients besides."""
    away = dataclasses.replace(EAGER, optimizer="offload")
    traced, _ = bp.Forecaster(of_sizes(GPT)).outline(away)

    def memory(**changes: Any) -> Memory:
        return Memory(traced, with_replaced(away, **changes), MACHINE)

    whole = memory()
    part = memory(device_states=whole.host / 2 / GIB)
    assert part.states == whole.host - part.host == whole.host // 2
    assert whole.copied == whole.gradients and part.copied == whole.gradients // 2
    assert memory(overlap=False).copied == 0
    everything = memory(device_states=1.0)
    assert (everything.host, everything.staged, everything.copied) == (0, 0, 0)
    update = {m.name: m for m in whole.moments(whole.whole_levels(Level.BLOCK))}["update"]
    assert update.parts["states that pass through"] == whole.staged + whole.copied


def test_copies_of_gradients_take_the_room_that_is_left() -> None:
    """Where not all updates can be hidden, those are that have room, and the rest takes its time."""
    forecaster = bp.Forecaster(of_sizes(Sizes(layers=8, hidden=1024, heads=8, vocab=4000)))
    away = Settings(optimizer="offload", recompute="block", batch=1, seq=64, compiled=False)
    whole, least = (
        forecaster(dataclasses.replace(away, overlap=overlap), MACHINE) for overlap in (True, False)
    )
    traced, _ = forecaster.outline(away)
    assert whole.seconds is not None and least.seconds is not None
    sizes = range(least.peak.total + 2**20, whole.peak.total, 2**25)
    assert len(sizes) > 2
    for size in (*sizes, whole.peak.total + 2**26):
        machine = bp.Machine(gpu="h200", gpu_memory=size / 0.97 / GIB)
        own, found = Memory(traced, away, machine), forecaster(away, machine)
        if size not in sizes:
            assert own.hidden == 1
            break
        assert found.fits and found.seconds is not None
        assert 0 <= own.copied < own.gradients and own.hidden == own.copied / own.gradients
        assert size - own.moments(own.whole_levels(Level.BLOCK))[-1].total < 2**25
        assert whole.seconds.update <= found.seconds.update <= least.seconds.update


def test_auto_takes_what_fits() -> None:
    """With room everything is kept; with less, what is chosen fits as long as anything does: for many
    rooms; the allocator's slack grows with what blocks keep, which no plan counts.
    """
    forecaster = bp.Forecaster(of_sizes(Sizes(layers=6, hidden=4096, heads=32, vocab=512)))
    settings = Settings(batch=64, seq=4096, compiled=False)
    traced, _ = forecaster.outline(settings)
    memory = Memory(traced, settings, MACHINE)
    ends = [memory.peak(memory.levels(room)).total for room in (0, 2**50)]
    for part in range(201):
        room = ends[0] + (ends[1] - ends[0]) * part // 200
        found = memory.peak(memory.levels(room))
        assert found.total <= room
        assert found.total > room - 2 * (ends[1] - ends[0]) / 6, "much more would have fit"
    cheap = forecaster(dataclasses.replace(settings, recompute="cheap"), MACHINE).peak.total
    forecasts = [
        forecaster(settings, bp.Machine(gpu_memory=size / 0.97 / GIB))
        for size in (2 * ends[1], (ends[1] + cheap) / 2, ends[0] / 2)
    ]
    assert [forecast.fits for forecast in forecasts] == [True, True, False]
    free, tight, _ = forecasts
    assert set(free.recompute) == {"nothing"} and len(tight.recompute) > 1
    assert tight.tokens_per_second is None  # the speed of a GPU that has only a size is not known


def test_memory_grows_with_what_takes_it() -> None:
    """More rows, less recomputation, fewer ranks: each takes more; ZeRO-2 more than ZeRO-3. Of LoRA
    only the adapters are trained: rank times the sum of both sides of the seven linear layers.
    """
    forecaster, two = bp.Forecaster(of_sizes(SIZES)), bp.Machine(gpu="h200", gpus=2)

    def total(machine: bp.Machine = two, **changes: Any) -> int:
        settings = with_replaced(EAGER, **{"batch": 32, "seq": 64, **changes})
        return forecaster(settings, machine).peak.tensors

    assert total(batch=64) > total() != total(MACHINE)
    assert total(recompute="block") < total(recompute="cheap") <= total() <= total(zero_level=2)
    found = forecaster(dataclasses.replace(EAGER, lora=4), MACHINE)
    sides = [(64, 64), (64, 32), (64, 32), (64, 64), (64, 96), (64, 96), (96, 64)]
    assert found.trained == 3 * 4 * sum(a + b for a, b in sides)
    assert found.peak.parts["optimizer states"] < 12 * found.parameters


def test_smaller_states_are_proposed_where_exact_ones_do_not_fit() -> None:
    """The form with most bits that fits, beside what fits exactly; none where that is as good."""
    sizes = Sizes(layers=2, hidden=4096, heads=32, vocab=512)
    forecaster = bp.Forecaster(of_sizes(sizes), every_level=False)
    settings = Settings(batch=2, seq=16, compiled=False)

    def found(gib: float, host: float = 9.0, **changes: Any) -> Settings | None:
        machine = bp.Machine(gpu_memory=gib, host_memory=host)
        wanted = with_replaced(settings, **changes)
        exact = nearest(forecaster, wanted, machine)
        proposed = with_smaller_states(forecaster, wanted, machine, exact)
        assert proposed is None or proposed.fits
        return None if proposed is None else proposed.settings

    forms = [("fp32", "fp32"), ("fp32", "split"), ("8bit", "fp32"), ("8bit", "split")]
    needed = []
    for moments, masters in forms:
        changes = {"moments": moments, "master_weights": masters, "recompute": "block"}
        own = forecaster(with_replaced(settings, **changes), MACHINE)
        needed.append(own.peak.total / 0.97 / GIB + 0.01)
    assert needed == sorted(needed, reverse=True)
    assert found(needed[0]) is None  # fits as it is
    for size, form in zip(needed[1:], forms[1:], strict=True):
        chosen = found(size)
        assert chosen is not None and chosen.batch == settings.batch and chosen.optimizer == "adam"
        assert (chosen.moments, chosen.master_weights) == form
    assert found(needed[3] - 0.3) is None and found(0.5, host=64.0) is None
    # The same forms on the host; in fp16 there is no split.
    few = found(needed[3] - 0.3, host=12.0, optimizer="offload")
    assert few is not None and (few.moments, few.master_weights) == forms[1]
    half = found(needed[2], dtype="fp16")
    assert half is not None and (half.moments, half.master_weights) == forms[2]
    assert found(needed[2], optimizer="torch") is None
    # of the optimizer, the plan and the flags of training
    assert arguments.MOMENTS == MOMENTS and arguments.MASTER_WEIGHTS == MASTER_WEIGHTS


class Plain(nn.Module):
    """A user's model: ids to logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, 32), nn.Linear(32, 50)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x).relu()
        out: Tensor = self.head(x)
        return out


def number() -> int:
    """No module."""
    return 3


PLAIN = f"{__name__}:Plain"


def test_models_of_all_sources(tmp_path: pathlib.Path) -> None:
    """A function of the user's: its blocks are the members of the list. A folder of transformers, as
    the model of transformers and as ours: the same elements.
    """
    traced, notes = bp.Forecaster(of_function(PLAIN)).outline(EAGER)
    assert len(traced.calls) == 3 and not notes
    params = list(Plain().layers[0].named_parameters())
    assert shard_of(groups_of(params)[0], 1).numel >= 32 * 33

    def loss(module: nn.Module, batch: int, seq: int) -> Tensor:
        out: Tensor = module(torch.zeros(batch, seq, dtype=torch.long))
        return out.float().mean()

    found = bp.forecast(Plain, loss, EAGER)
    assert found.fits and found.parameters == sum(p.numel() for p in Plain().parameters())
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
        found = bp.Forecaster(source, every_level=False)(EAGER, MACHINE)
        assert found.parameters == real and found.recompute == {"nothing": 2}
        assert found.activations["nothing"] > 2 * 2 * 16 * 64 * 2


REFUSED = f"""
--gpu h200
{PLAIN}
nowhere_at_all:model --gpu h200
{__name__}:nothing --gpu h200
{__name__}:number --gpu h200
./no/such/folder --gpu h200
--layers 3 --gpu h200
--layers=-3 --hidden=64 --heads=4 --vocab=10 --gpu h200
--layers=3 --hidden=64 --heads=5 --vocab=10 --gpu h200
{PLAIN} --gpu h200 --batch 0
{PLAIN} --gpu h200 --tokens=-1
{PLAIN} --gpu h200 --tp-size 2
{PLAIN} --gpu h200 --optimizer torch --moments 8bit
{PLAIN} --gpu h200 --optimizer offload --device-states=-1
{PLAIN} --gpu h200 --dtype fp16 --master-weights none
{PLAIN} --gpu-memory=-2
"""


def test_bad_input_ends_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit status 2, and a line that says what is wrong, and what to give in its place."""

    def said(*words: str) -> str:
        assert main(["plan", *words]) == 2, words
        out, err = capsys.readouterr()
        assert out == "" and err.startswith("error: ") and err.count("\n") == 1, words
        return err

    for line_ in REFUSED.strip().splitlines():
        said(*line_.split())

    def refuse(name: str) -> None:
        raise OSError(f"no connection to read {name}")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", refuse)
    words = said("somebody/model", "--gpu", "h200")
    assert "no connection to read somebody/model" in words
    assert "Name a folder that has one, or give sizes (--layers" in words
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "needs the package transformers" in said(str(tmp_path), "--gpu", "h200")
    for error, call_ in (
        ("nearest: 'h100'", lambda: bp.Machine(gpu="h10")),
        (
            "10 goes with optimizer offload, got adam",
            lambda: with_replaced(EAGER, device_states=10.0),
        ),
        ("expected optimizer offload with it", lambda: with_replaced(EAGER, overlap=False)),
    ):
        with pytest.raises(ConfigurationError, match=error):
            call_()


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    """Text and JSON, for what fits and what does not, which has another exit status; where the host has
    no room for all states, the nearest that fits places the rest on the GPU. Time of the update is by
    the bytes that it reads and writes.
    """

    def plan(status: int, text: str) -> str:
        assert main(["plan", "--no-compile", *text.split()]) == status
        return capsys.readouterr().out

    said = plan(0, f"{PLAIN} --tokens 1e9 --gpu h200")
    assert "fits." in said and "hours for 1,000,000,000 tokens" in said
    found = json.loads(plan(1, f"{PLAIN} --gpu-memory 0.5 --json"))
    assert found["fits"] is False and found["peak_bytes"] == sum(found["parts"].values())
    assert found["smaller_states"] is None
    wide = "--layers=2 --hidden=4096 --heads=32 --vocab=512"
    said = plan(1, f"{wide} --gpu-memory 6 --host-memory 9 --seq 16")
    assert "guides/precision): --moments 8bit (" in said and "nothing near fits" not in said
    away = "--layers=8 --hidden=1024 --heads=8 --vocab=4000 --ff=4096 --gpu-memory=8"
    away += " --optimizer=offload"
    plan(0, f"{away} --host-memory=64 --brief")
    nearby = re.search(
        r"nearest that does: .*--device-states ([\d.]+)", plan(1, f"{away} --host-memory=9")
    )
    assert nearby is not None
    plan(0, f"{away} --recompute=block --device-states={nearby[1]} --host-memory=9 --brief")
    small = "--layers=2 --hidden=64 --heads=4 --vocab=96 --gpu=h200 --brief --json"
    exact, few = (
        json.loads(plan(0, small + form)) for form in ("", " --moments=8bit --master-weights=split")
    )
    for one, bytes_ in ((exact, 12), (few, 4.125)):
        assert one["parts"]["optimizer states"] / one["parameters"] == pytest.approx(
            bytes_, rel=1e-3
        )
    assert few["step_seconds"] < exact["step_seconds"] and few["settings"]["moments"] == "8bit"
    # one line for each command; of an unknown one, the nearest
    assert main([]) == 0
    listed = capsys.readouterr().out
    assert all(f"\n  {name} " in listed for name in COMMANDS)
    assert main(["pln"]) == 2 and "'plan'" in capsys.readouterr().err


def test_env_masks_secrets_and_survives_what_it_cannot_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Values of tokens and keys are not shown; items that fail say why."""
    secrets = {"HF_TOKEN": "geheim1", "WANDB_API_KEY": "geheim2"}
    for name, value in {**secrets, "NCCL_DEBUG": "INFO", "PATH": ""}.items():
        monkeypatch.setenv(name, value)  # no compiler, no nvidia-smi
    found = collect()
    assert found["variables"]["NCCL_DEBUG"] == "INFO"
    assert found["topology"].startswith("not known (")
    assert main(["env", "--json"]) == 0
    shown = capsys.readouterr().out
    assert "geheim" not in shown and json.loads(shown)["packages"]["torch"]
    assert masked({"HF_ENDPOINT": "https://me:pw@host"}) == {"HF_ENDPOINT": "https://***@host"}


def waited(words: list[str]) -> str:
    """What a comparison says; it says so once."""
    comparison, said = Comparison(words), None
    while said is None:
        said = comparison.said(2 * GIB)
        time.sleep(0.05)
    assert comparison.said(2 * GIB) is None
    return said


def test_a_run_compares_itself(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what a process of its own prints; if that fails, the reason. It can be ended early."""
    assert line(int(61.2 * GIB), 62 * GIB) == "memory: 61.2 GiB forecast, 62.0 measured (+1.3%)"
    (tmp_path / "forecasting.py").write_text("print('{\"peak_bytes\": 1073741824}')")
    (tmp_path / "endless.py").write_text("import time; time.sleep(600)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert waited(["forecasting"]) == "memory: 1.0 GiB forecast, 2.0 measured (+100.0%)"
    assert "2.0 GiB in use; no forecast: " in waited(["missing_module_of_this_test"])
    comparison = Comparison(["endless"])
    assert comparison.said(1) is None
    comparison.close()


def test_programs_ask_for_their_own_forecast(capsys: pytest.CaptureFixture[str]) -> None:
    """The words that the GPT-2 example has for it are understood, and describe its model."""
    flags = "--preset gpt2 --layers 2 --compile --moments 8bit --master-weights split"
    with importable(ROOT / "examples" / "gpt2"):
        train, options = (importlib.import_module(name) for name in ("train", "options"))
        chosen = options.parse_options(flags.split(), "cuda")
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
    width, found = 768, json.loads(capsys.readouterr().out)
    table = chosen.vocab_size * width  # the reference has none of positions
    elements = table + 2 * (12 * width**2 + 13 * width) + 2 * width
    assert found["parameters"] == pytest.approx(elements, rel=0.001)
    assert found["settings"]["moments"] == "8bit" and found["settings"]["master_weights"] == "split"
    parser = argparse.ArgumentParser()
    train_command.add_arguments(parser)
    args = parser.parse_args(["--model-config", "folder", "--data", "x", "--lora-rank", "8"])
    package, *words = model_center_plan.words_of(args)
    assert package == "model_center" and model_center_main([*words, *machine]) != 0
    said = capsys.readouterr().err
    assert "unrecognized" not in said and "folder" in said
