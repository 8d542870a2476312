"""model_center's models beside others; prints a JSON record per measurement and saves all of them.

python benchmarks/language_models.py --name language-models --commit $(git rev-parse HEAD)
torchrun --standalone --nproc_per_node=2 benchmarks/language_models.py --what bert t5 --name small

llama   forward and backward of LLaMA 3 8B with 8 layers, 8192 tokens: model_center's, and a plain
        one in the same engine
bert    whole training steps of BERT-large on 256 sequences of 128 tokens: model_center's, and
        transformers' with SDPA and torch.compile, with fp32 weights under autocast (its Trainer's
        bf16=True) and with weights and optimizer in bf16 alone
t5      the same of T5-base on 32 pairs of 512 and 128 tokens

On several GPUs each has as many rows, and transformers' models are in DistributedDataParallel with
gradients in bf16.

loading a checkpoint of 2.7e9 parameters in bf16, in several safetensors files:
benchmarks/loading.py
"""

from __future__ import annotations

import argparse
import functools
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import transformers
from machine import machine
from reports import report_of, write
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

import bmtrain as bmt
from model_center.model.bert import Bert, BertConfig
from model_center.model.llama import Llama, LlamaConfig
from model_center.model.t5 import T5, T5Config
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


def training(
    model: nn.Module, loss_of: Callable[..., torch.Tensor], batch: Sequence[torch.Tensor]
) -> Step:
    """Whole steps of a model in this engine: clip to norm 1, AdamW with fp32 masters."""
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), lr=1e-5, weight_decay=0.01)
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(optimizer)

    def step() -> torch.Tensor:
        manager.zero_grad()
        loss = loss_of(*batch)
        manager.backward(loss)
        manager.clip_grad_norm(optimizer.param_groups, max_norm=1.0)
        manager.step()
        return loss

    return step


def training_there(
    model: nn.Module,
    loss_of: Callable[..., torch.Tensor],
    batch: Sequence[torch.Tensor],
    autocasts: bool,
) -> Step:
    """The same by torch: `model` is in what `loss_of(compiled, *batch)` is called with."""
    params = list(model.parameters())
    if bmt.world_size() > 1:
        model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        model.register_comm_hook(None, bf16_compress_hook)
    compiled = torch.compile(model, dynamic=False)
    optimizer = torch.optim.AdamW(params, lr=1e-5, weight_decay=0.01, fused=True)

    def step() -> torch.Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocasts):
            loss = loss_of(compiled, *batch)
        loss.backward()
        nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


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
    loss_function = bmt.loss.FusedCrossEntropy()
    return training(model, lambda ids, mask, labels: loss_function(model(ids, mask), labels), batch)


def transformers_bert(batch: Batch, dtype: torch.dtype) -> Step:
    """transformers' BERT-large, compiled whole; with fp32 weights under autocast."""
    config = transformers.BertConfig(
        hidden_size=1024, num_attention_heads=16, intermediate_size=4096, num_hidden_layers=24
    )
    encoder = transformers.BertModel(config)  # SDPA is its default
    model = Classifier(encoder, nn.Linear(1024, 2)).to(device="cuda", dtype=dtype).train()
    return training_there(
        model,
        lambda compiled, ids, mask, labels: nn.functional.cross_entropy(
            compiled(ids, mask).float(), labels
        ),
        batch,
        dtype == torch.float32,
    )


Pairs = tuple[torch.Tensor, torch.Tensor]


def ours_t5(batch: Pairs) -> Step:
    """model_center's T5-base, bf16 weights."""
    config = T5Config(
        vocab_size=32128,
        dim_model=768,
        num_heads=12,
        dim_head=64,
        dim_ff=3072,
        num_encoder_layers=12,
        num_decoder_layers=12,
        dropout_p=0.1,
        tied=True,
        scale_logits=True,
        dtype="bfloat16",
        use_checkpoint=False,
    )
    model = T5(config)
    bmt.init_parameters(model)
    for block in [*model.encoder.layers, *model.decoder.layers]:
        block.compile(dynamic=False)
    loss_function = bmt.loss.FusedCrossEntropy()

    def loss_of(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        given = torch.cat([torch.zeros_like(labels[:, :1]), labels[:, :-1]], 1)
        logits = model(input_ids=ids, decoder_input_ids=given, output_logits=True).logits
        return loss_function(logits.flatten(0, 1), labels.flatten())

    return training(model, loss_of, batch)


def transformers_t5(batch: Pairs, dtype: torch.dtype) -> Step:
    """transformers' T5-base, compiled whole; with fp32 weights under autocast."""
    config = transformers.T5Config(d_model=768, d_ff=3072, num_layers=12, num_heads=12)
    config.decoder_start_token_id = 0
    model: nn.Module = transformers.T5ForConditionalGeneration(config)
    model.to(device="cuda", dtype=dtype).train()
    return training_there(
        model,
        lambda compiled, ids, labels: compiled(input_ids=ids, labels=labels).loss,
        batch,
        dtype == torch.float32,
    )


def t5_records() -> Iterator[dict[str, Any]]:
    """All T5s."""
    batch = (
        torch.randint(1000, 30000, (32, 512), device="cuda"),
        torch.randint(1000, 30000, (32, 128), device="cuda"),
    )
    yield from _compared(
        {"what": "t5", "sequences": 32},
        {
            "model_center": lambda: ours_t5(batch),
            "transformers, autocast": lambda: transformers_t5(batch, torch.float32),
            "transformers, bf16": lambda: transformers_t5(batch, torch.bfloat16),
        },
    )


def _compared(
    common: dict[str, Any], builders: dict[str, Callable[[], Step]]
) -> Iterator[dict[str, Any]]:
    """Two measurements of each, in turn, so that a drift of the machine shows."""
    steps = {name: build() for name, build in builders.items()}
    for repeat in range(2):
        for name, step in steps.items():
            yield {
                **common,
                "gpus": bmt.world_size(),
                "model": name,
                "repeat": repeat,
                **timed(step),
            }


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
        yield from _compared(
            {"what": "bert", "mask": kind, "sequences": 256},
            {
                "model_center": functools.partial(ours_bert, batch),
                "transformers, autocast": functools.partial(
                    transformers_bert, batch, torch.float32
                ),
                "transformers, bf16": functools.partial(transformers_bert, batch, torch.bfloat16),
            },
        )


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


KINDS = {"llama": llama_records, "bert": bert_records, "t5": t5_records, "loading": loading_records}


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
    ranks = bmt.world_size()
    start = f"torchrun --standalone --nproc_per_node={ranks} " if ranks > 1 else ""
    command = f"{start}benchmarks/language_models.py --what {' '.join(args.what)}"
    report = report_of(
        [],
        commit=args.commit,
        command=f"{command} --name {args.name}",
        machine=machine(),
        transformers=transformers.__version__,
    )
    path = pathlib.Path(args.folder) / f"{args.name}.json"
    for what in args.what:
        for record in KINDS[what]():
            bmt.print_rank(json.dumps(record), flush=True)
            report["records"].append(record)
            if bmt.rank() == 0:
                write(report, path)
    bmt.print_rank(path)


if __name__ == "__main__":
    main()
