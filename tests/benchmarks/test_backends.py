"""Backends train the same model on the same data: from the same values, their losses are the
same.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.ranks.runner import run_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

import bmtrain as bmt

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
STEPS = 8
RUNS = (
    ("bmtrain", "none"),
    ("bmtrain", "all"),
    ("fsdp2", "none"),
    ("fsdp2", "all"),
    ("fsdp2", "selective"),
    ("plain", "none"),
)


def load(model: nn.Module, file: str) -> None:
    """Full tensors under plain names, into a model of any backend."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model.module.load_state_dict(torch.load(file))
    elif any(isinstance(param, bmt.DistributedParameter) for param in model.parameters()):
        bmt.load(model, file)
    else:
        set_model_state_dict(
            model, torch.load(file), options=StateDictOptions(full_state_dict=True)
        )


def losses_of(shape: str, folder: str) -> dict[str, list[float]]:
    """Of every backend and way to recompute, on this rank."""
    sys.path.insert(0, str(BENCHMARKS))
    import backends
    from throughput import batch_of

    from models import initialise
    from options import Options

    warnings.simplefilter("ignore")  # torch's about fully_shard on the CPU
    found = {}
    for name, recompute in RUNS:
        options = Options(
            backend=name, shape=shape, recompute=recompute, compile=False, device="cpu"
        )
        backend: Any = backends.BACKENDS[name](options)
        torch.manual_seed(0)
        start = options.geometry.model()
        initialise(start)
        file = f"{folder}/{bmt.rank()}.pt"
        # values that bf16 has: this library's fp32 masters start from its bf16 weights
        torch.save(
            {key: value.bfloat16().float() for key, value in start.state_dict().items()}, file
        )
        load(backend.model, file)
        batch = batch_of(options.geometry, 2)
        found[f"{name} {recompute}"] = [backend.step(*batch).item() for _ in range(STEPS)]
    return found


@pytest.mark.parametrize("shape", ["tiny", "llama-tiny"])
def test_losses(shape: str, tmp_path: Path) -> None:
    """Only where bf16 rounds is different; the loss falls from that of guessing (6.24)."""
    for found in run_ranks(losses_of, 2, shape, str(tmp_path)):
        reference = found["plain none"]
        assert reference[-1] < reference[0] - 0.25
        for name, losses in found.items():
            assert losses == pytest.approx(reference, abs=0.004), name


def graphs_of_fsdp2() -> dict[str, tuple[int, list[float]]]:
    """How many graphs there are to compile in three steps, and the losses, for every way to
    recompute.
    """
    sys.path.insert(0, str(BENCHMARKS))
    import backends

    from options import from_words

    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    warnings.simplefilter("ignore")  # torch's about fully_shard on the CPU
    as_it_is = nn.Module.compile
    nn.Module.compile = functools.partialmethod(as_it_is, backend=keep)  # type: ignore[assignment]
    found = {}
    ids = torch.randint(0, 512, (2, 64))
    for recompute in ("none", "all", "selective"):
        torch._dynamo.reset()
        graphs.clear()
        options = from_words(
            f"--backend fsdp2 --shape llama-tiny --device cpu --recompute {recompute}"
        )
        backend = backends.BACKENDS["fsdp2"](options)
        losses = [backend.step(ids, ids).item() for _ in range(3)]
        found[recompute] = len(graphs), losses
    return found


def test_fsdp2_compiles_blocks_and_head_as_one_graph_each() -> None:
    """One for all blocks and one for the head; hooks and recomputation cut nothing off."""
    for found in run_ranks(graphs_of_fsdp2, 2):
        for recompute, (graphs, losses) in found.items():
            assert graphs == 2, recompute
            assert losses[-1] < losses[0], recompute


def accounts() -> list[tuple[list[str], list[float]]]:
    """Levels of the four layers by the plan, and losses, by the form of the masters."""
    sys.path.insert(0, str(BENCHMARKS))
    import backends

    from options import from_words

    found = []
    for form in ("fp32", "split"):
        torch.manual_seed(0)
        words = "--backend bmtrain --shape tiny --device cpu --no-compile --recompute auto"
        backend = backends.BACKENDS["bmtrain"](from_words(f"{words} --master-weights {form}"))
        ids = torch.randint(0, 512, (2, 64), generator=torch.Generator().manual_seed(1))
        losses = [backend.step(ids, ids).item() for _ in range(5)]
        found.append((backend.account()["levels"], losses))
    return found


def test_what_a_record_says_of_the_plan() -> None:
    """Levels in the order of layers, where not all of them keep everything. Masters have the same
    numbers in either form.
    """
    for (levels, losses), (others, as_split) in run_ranks(
        accounts, 2, init={"memory_limit": 2**20}
    ):
        assert levels == others
        assert sum(int(words.split()[0]) for words in levels) == 4 and len(levels) > 1
        assert losses == pytest.approx(as_split, abs=1e-3) and losses[-1] < losses[0]


class Engine:
    """What the documentation of DeepSpeed says that its engine does, done by plain PyTorch."""

    def __init__(self, model: nn.Module, config: dict[str, Any]) -> None:
        settings = config["optimizer"]["params"]
        self.module, self.clip = model, config["gradient_clipping"]
        self.optimizer = torch.optim.AdamW(
            model.parameters(), settings["lr"], weight_decay=settings["weight_decay"]
        )

    def __call__(self, *args: torch.Tensor) -> torch.Tensor:
        return self.module(*args)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        nn.utils.clip_grad_norm_(self.module.parameters(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()


def test_the_calls_of_deepspeed(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Made on a stand-in, as a machine need not have it: the loss falls, with everything
    recomputed.
    """
    calls: list[str] = []

    def gathered(
        params: list[nn.Parameter], modifier_rank: int
    ) -> contextlib.AbstractContextManager[None]:
        calls.append(f"{len(params)} of {modifier_rank}")
        return contextlib.nullcontext()

    zero = types.SimpleNamespace(
        Init=lambda config_dict_or_path, dtype: torch.device("cpu"), GatheredParameters=gathered
    )

    def initialize(
        model: nn.Module, config: dict[str, Any], model_parameters: Any
    ) -> tuple[Any, ...]:
        assert config["zero_optimization"]["stage"] == 3
        assert config["bf16"] == {"enabled": True}
        assert config["optimizer"]["params"]["torch_adam"]
        return Engine(model, config), None, None, None

    stand_in = types.SimpleNamespace(
        zero=zero, initialize=initialize, init_distributed=lambda: calls.append("joined")
    )
    monkeypatch.setitem(sys.modules, "deepspeed", stand_in)
    options = bench.options.from_words(
        "--backend deepspeed --shape tiny --device cpu --no-compile --recompute"
    )
    backend = bench.backends.BACKENDS["deepspeed"](options)
    ids = torch.randint(0, 512, (2, 64))
    losses = [backend.step(ids, ids).item() for _ in range(3)]
    assert losses[-1] < losses[0]
    assert calls[0] == "joined"
    assert calls[1:3] == ["1 of 0", "1 of 0"]  # token and position embeddings; then the layers'
    assert len(calls) == 1 + 2 + 4 * 8 + 2


def test_deepspeed_is_not_compiled_where_its_loss_is_wrong(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    options = bench.options.from_words("--backend deepspeed --shape tiny --device cpu")
    with pytest.raises(
        RuntimeError, match=r"from torch 2\.13 on, this is 2\.11\.0\+cu130: use --no-compile"
    ):
        bench.backends.BACKENDS["deepspeed"](options)
