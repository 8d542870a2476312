"""model_center's models beside others on one GPU; prints one JSON record per measurement and saves
all of them.

python benchmarks/language_models.py --name language-models --commit $(git rev-parse HEAD)

llama   forward and backward of LLaMA 3 8B with 8 layers, 8192 tokens: model_center's, and a plain
        one in the same engine
bert    whole training steps of BERT-large on 256 sequences of 128 tokens: model_center's, and
        transformers' with SDPA and torch.compile, with fp32 weights under autocast (its Trainer's
        bf16=True) and with weights and optimizer in bf16 alone

loading a checkpoint of 2.7e9 parameters in bf16, in several safetensors files:
benchmarks/loading.py
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
from machine import machine
from reports import report_of, write
from torch import nn

import bmtrain as bmt
from model_center.model.bert import Bert, BertConfig
from model_center.model.llama import Llama, LlamaConfig
from models import LlamaShape

HERE = pathlib.Path(__file__).parent
Step = Callable[[], object]


def timed(step: Step, warmup: int = 4, steps: int = 10) -> dict[str, float]:
    """Median seconds of a step with the device idle before and after, and memory."""
    times = []
    torch.cuda.reset_peak_memory_stats()
    for number in range(warmup + steps):
        torch.cuda.synchronize()
        began = time.perf_counter()
        step()
        torch.cuda.synchronize()
        if number >= warmup:
            times.append(time.perf_counter() - began)
    peak = torch.cuda.max_memory_allocated() / 2**30
    return {
        "seconds": round(statistics.median(times), 5),
        "slowest": round(max(times), 5),
        "allocated_gib": round(peak, 2),
    }


def backward_of(
    model: nn.Module,
    loss_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ids: torch.Tensor,
) -> Step:
    """Forward and backward of the mean loss of the next token; `loss_of` takes token ids and
    targets, both (batch, seq).
    """
    targets = ids.roll(-1, 1)

    def step() -> None:
        loss_of(ids, targets).backward()
        model.zero_grad(set_to_none=False)

    return step


def ours_llama(shape: LlamaShape, ids: torch.Tensor) -> Step:
    """model_center's LLaMA."""
    config = LlamaConfig(
        vocab_size=shape.vocab,
        dim_model=shape.dim,
        num_heads=shape.heads,
        num_heads_kv=shape.key_heads,
        dim_head=shape.head_dim,
        dim_ff=shape.ff,
        num_layers=shape.layers,
        norm_eps=1e-5,
        rope_base=shape.base,
        dtype="bfloat16",
        use_checkpoint=False,
    )
    model = Llama(config)
    bmt.init_parameters(model)
    for block in model.encoder.layers:
        block.compile(dynamic=False)
    loss_function = bmt.loss.FusedCrossEntropy()
    return backward_of(
        model,
        lambda ids, targets: loss_function(model(ids).logits.flatten(0, 1), targets.flatten()),
        ids,
    )


def plain_llama(shape: LlamaShape, ids: torch.Tensor) -> Step:
    """The plain model, sharded and compiled block by block as the engine's own benchmarks do."""
    # its end gives logits, as model_center's does: the loss is not compiled with it
    with torch.device("meta"):
        model = shape.model(lambda hidden, project, _: project(hidden)).to(torch.bfloat16)
    blocks = [bmt.Block(block, use_checkpoint=False) for block in model.blocks]
    model.blocks = bmt.TransformerBlockList(blocks)  # type: ignore[assignment]
    model.head = bmt.Block(model.head, use_checkpoint=False, zero_level=2)  # type: ignore[assignment]
    sharded = bmt.BMTrainModelWrapper(model)
    bmt.init_parameters(sharded)
    for block in [*blocks, sharded.head]:
        block.compile(dynamic=False)
    loss_function = bmt.loss.FusedCrossEntropy()
    return backward_of(
        sharded, lambda ids, targets: loss_function(sharded(ids, targets), targets.flatten()), ids
    )


class Classifier(nn.Module):
    """Two classes from the pooled output of an encoder."""

    def __init__(self, encoder: nn.Module, head: nn.Module, **options: Any) -> None:
        super().__init__()
        self.encoder, self.head, self.options = encoder, head, options

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        pooled = self.encoder(input_ids=ids, attention_mask=mask, **self.options).pooler_output
        logits: torch.Tensor = self.head(pooled)
        return logits


Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def ours_bert(batch: Batch) -> Step:
    """model_center's BERT-large: bf16 weights, fp32 masters in the optimizer."""
    config = BertConfig(
        vocab_size=30522,
        dim_model=1024,
        num_heads=16,
        dim_ff=4096,
        num_layers=24,
        dropout_p=0.1,
        dtype="bfloat16",
        use_checkpoint=False,
    )
    encoder = Bert(config)
    bmt.init_parameters(encoder)
    for block in encoder.encoder.layers:
        block.compile(dynamic=False)
    head = nn.Linear(1024, 2, device="cuda", dtype=torch.bfloat16)
    model = Classifier(encoder, head, output_logits=False, output_pooler_output=True)
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), lr=1e-5, weight_decay=0.01)
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(optimizer)
    loss_function = bmt.loss.FusedCrossEntropy()

    def step() -> None:
        loss = loss_function(model(batch[0], batch[1]), batch[2])
        manager.zero_grad()
        manager.backward(loss)
        manager.clip_grad_norm(optimizer.param_groups, max_norm=1.0)
        manager.step()

    return step


def transformers_bert(batch: Batch, dtype: torch.dtype) -> Step:
    """transformers' BERT-large, compiled whole; with fp32 weights under autocast."""
    config = transformers.BertConfig(
        hidden_size=1024, num_attention_heads=16, intermediate_size=4096, num_hidden_layers=24
    )
    encoder = transformers.BertModel(config)  # SDPA is its default
    model = Classifier(encoder, nn.Linear(1024, 2)).to(device="cuda", dtype=dtype).train()
    compiled = torch.compile(model, dynamic=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.01, fused=True)

    def step() -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=dtype == torch.float32):
            loss = nn.functional.cross_entropy(compiled(batch[0], batch[1]).float(), batch[2])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def llama_records() -> Iterator[dict[str, Any]]:
    """Both LLaMAs, alternating, so that a drift of the machine shows."""
    shape = LlamaShape(layers=8)
    ids = torch.randint(0, shape.vocab, (2, 8192), device="cuda")
    steps = {"model_center": ours_llama(shape, ids), "plain": plain_llama(shape, ids)}
    for repeat in range(3):
        for name, step in steps.items():
            yield {
                "what": "llama",
                "model": name,
                "repeat": repeat,
                "tokens": ids.numel(),
                **timed(step),
            }


def bert_records() -> Iterator[dict[str, Any]]:
    """All BERTs, on full sequences and on ones padded to a mean of 3 / 4."""
    ids = torch.randint(1000, 30000, (256, 128), device="cuda")
    labels = torch.randint(0, 2, (256,), device="cuda")
    lengths = torch.randint(64, 129, (256, 1), device="cuda")
    masks = {
        "full": torch.ones_like(ids),
        "padded": (torch.arange(128, device="cuda") < lengths).long(),
    }
    for kind, mask in masks.items():
        batch = (ids, mask, labels)
        steps = {
            "model_center": ours_bert(batch),
            "transformers, autocast": transformers_bert(batch, torch.float32),
            "transformers, bf16": transformers_bert(batch, torch.bfloat16),
        }
        for repeat in range(2):
            for name, step in steps.items():
                yield {
                    "what": "bert",
                    "mask": kind,
                    "model": name,
                    "repeat": repeat,
                    "sequences": 256,
                    **timed(step),
                }
        del steps


def loading_records() -> Iterator[dict[str, Any]]:
    """Both layouts: one as it is in the model, one whose matrices are turned and cut."""
    with tempfile.TemporaryDirectory() as folder:
        for layout in ("llama", "gpt2"):
            command = [
                sys.executable,
                str(HERE / "loading.py"),
                "--layout",
                layout,
                "--gigabytes",
                "5.4",
                "--folder",
                folder,
            ]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            yield {"what": "loading", **json.loads(done.stdout.splitlines()[-1])}


KINDS = {"llama": llama_records, "bert": bert_records, "loading": loading_records}


def main() -> None:
    """Measure and save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--what", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--name", required=True)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--folder", default=str(HERE / "results"))
    args = parser.parse_args()
    bmt.init_distributed(seed=0)
    torch.set_float32_matmul_precision("high")
    records = []
    for what in args.what:
        for record in KINDS[what]():
            print(json.dumps(record), flush=True)
            records.append(record)
    command = f"benchmarks/language_models.py --what {' '.join(args.what)} --name {args.name}"
    path = pathlib.Path(args.folder) / f"{args.name}.json"
    write(
        report_of(
            records,
            commit=args.commit,
            command=command,
            machine=machine(),
            transformers=transformers.__version__,
        ),
        path,
    )
    print(path)


if __name__ == "__main__":
    main()
