"""Backends train the same model on the same data: from the same values, their losses are the same."""

import warnings

import pytest
import torch
from tests.benchmarks.conftest import BENCHMARKS, Modules
from tests.modules import importable
from tests.ranks.runner import run_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

import bmtrain as bmt

RUNS = ("bmtrain none", "bmtrain all", "fsdp2 none", "fsdp2 all", "fsdp2 selective", "plain none")


def made(bench, words):
    options = bench.options.from_words(f"{words} --device cpu")
    return bench.backends.BACKENDS[options.backend](options)


def load(model, file):
    """Full tensors under plain names, into a model of any backend."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model.module.load_state_dict(torch.load(file))
    elif any(isinstance(param, bmt.DistributedParameter) for param in model.parameters()):
        bmt.load(model, file)
    else:
        options = StateDictOptions(full_state_dict=True)
        set_model_state_dict(model, torch.load(file), options=options)


def losses_of(shape, folder):
    """Of every backend and way to recompute, on this rank."""
    found, bench = {}, Modules()
    with importable(BENCHMARKS), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's about fully_shard on the CPU
        for run in RUNS:
            name, recompute = run.split()
            words = f"--backend {name} --shape {shape} --no-compile --recompute {recompute}"
            backend = made(bench, words)
            torch.manual_seed(0)
            geometry = bench.models.SHAPES[shape]
            start = geometry.model()
            bench.models.initialise(start)
            file = f"{folder}/{bmt.rank()}.pt"
            # values that bf16 has: this library's fp32 masters start from its bf16 weights
            rounded = {key: x.bfloat16().float() for key, x in start.state_dict().items()}
            torch.save(rounded, file)
            load(backend.model, file)
            batch = bench.throughput.batch_of(geometry, 2)
            found[run] = [backend.step(*batch).item() for _ in range(8)]
    return found


@pytest.mark.long
@pytest.mark.fresh  # meshes of FSDP keep sockets
@pytest.mark.parametrize("shape", ["llama-tiny", "tiny"])
def test_losses(shape, tmp_path):
    """Only where bf16 rounds is different; the loss falls from that of guessing (6.24)."""
    for found in run_ranks(losses_of, 2, shape, str(tmp_path)):
        reference = found["plain none"]
        assert reference[-1] < reference[0] - 0.25
        for name, losses in found.items():
            assert losses == pytest.approx(reference, abs=0.004), name
