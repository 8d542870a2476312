"""A stranger's own modules, without an option, beside PyTorch, DDP and FSDP2 at their best.

python benchmarks/as_written.py gpt2-one-gpu gpt2-two-gpus --out benchmarks/results/as-written.json

Models are plain layers in a ModuleList with head and loss in `forward`, or those of transformers.
Ours: one call of BMTrainModelWrapper, AdamOptimizer and OptimManager. The peers compile and clip;
each runs in processes of its own, one after the other, on the same cards.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import peft
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from machine import machine_from_outside
from reports import report_of, write
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import bmtrain as bmt

GIB = 2**30
RESULT = "RESULT "


@dataclasses.dataclass(frozen=True)
class Geometry:
    """Of a decoder. `kv_heads` is set for models like Llama."""

    layers: int
    dim: int
    heads: int
    hidden: int
    seq: int
    vocab: int
    kv_heads: int | None = None


GEOMETRIES = {
    "gpt2": Geometry(12, 768, 12, 3072, 1024, 50304),
    "llama-8b": Geometry(32, 4096, 32, 14336, 4096, 128256, kv_heads=8),
}
TRANSFORMERS = {"bert-large": 128, "t5-base": 512, "llama-8b-lora": 4096}  # tokens of a row


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Rotary positions of (batch, heads, tokens, dim)."""
    half = x.shape[-1] // 2
    rates = 500000.0 ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angles = torch.arange(x.shape[-2], device=x.device, dtype=torch.float32)[:, None] * rates
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Layer(nn.Module):
    """A layer of GPT-2 or Llama."""

    def __init__(self, g: Geometry) -> None:
        super().__init__()
        self.is_llama, self.dim = g.kv_heads is not None, g.dim // g.heads
        own, norm = self.dim * (g.kv_heads or g.heads), nn.RMSNorm if g.kv_heads else nn.LayerNorm
        bias = not self.is_llama
        self.norm1, self.norm2 = norm(g.dim, eps=1e-5), norm(g.dim, eps=1e-5)
        self.q, self.o = (nn.Linear(g.dim, g.dim, bias=bias) for _ in range(2))
        self.k, self.v = (nn.Linear(g.dim, own, bias=bias) for _ in range(2))
        self.up, self.down = (
            nn.Linear(g.dim, g.hidden, bias=bias),
            nn.Linear(g.hidden, g.dim, bias=bias),
        )
        if self.is_llama:
            self.gate = nn.Linear(g.dim, g.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm1(x)
        q, k, v = (
            p(h).unflatten(-1, (-1, self.dim)).transpose(1, 2) for p in (self.q, self.k, self.v)
        )
        if self.is_llama:
            q, k = rotated(q), rotated(k)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.is_llama)
        x = x + self.o(a.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        if self.is_llama:
            return x + self.down(F.silu(self.gate(h)) * self.up(h))
        return x + self.down(F.gelu(self.up(h), approximate="tanh"))


class Decoder(nn.Module):
    """Gives the loss. `recomputes` is for peers that do not decide that by themselves."""

    def __init__(self, g: Geometry, recomputes: bool = False) -> None:
        super().__init__()
        self.recomputes, self.vocab = recomputes, g.vocab
        self.tokens = nn.Embedding(g.vocab, g.dim)
        self.positions = None if g.kv_heads else nn.Embedding(g.seq, g.dim)
        self.layers = nn.ModuleList(Layer(g) for _ in range(g.layers))
        self.norm = (nn.RMSNorm if g.kv_heads else nn.LayerNorm)(g.dim, eps=1e-5)
        self.head = nn.Linear(g.dim, g.vocab, bias=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tokens(input_ids)
        if self.positions is not None:
            x = x + self.positions(torch.arange(input_ids.shape[1], device=x.device))
        for layer in self.layers:
            if self.recomputes:
                x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
            else:
                x = layer(x)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.view(-1, self.vocab), labels.reshape(-1))


def model_of(name: str, dtype: torch.dtype, recomputes: bool) -> nn.Module:
    """The model on this rank's GPU, with the same values on all."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        if name in GEOMETRIES:
            model: nn.Module = Decoder(GEOMETRIES[name], recomputes)
        else:
            model = of_transformers(name, recomputes)
    with torch.no_grad():
        for param in model.parameters():
            _ = param.normal_(0, 0.02) if param.dim() > 1 else param.fill_(0.5)
    # Masters of all begin at numbers of bf16. A step of 1e-4 is about what these are apart: from
    # other numbers the losses of the first steps would differ by some hundredths.
    return model.bfloat16().to(dtype)


def of_transformers(name: str, recomputes: bool) -> nn.Module:
    """BERT-large for masked tokens, T5-base, or Llama-3-8B with LoRA by peft."""
    settings: dict[str, Any]
    if name == "bert-large":
        settings = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16}
        settings |= {"intermediate_size": 4096, "vocab_size": 30528}
        settings |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        return transformers.BertForMaskedLM(transformers.BertConfig(**settings))
    if name == "t5-base":
        settings = {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12}
        settings |= {"dropout_rate": 0.0, "use_cache": False}
        settings |= {"decoder_start_token_id": 0, "pad_token_id": 0}
        return transformers.T5ForConditionalGeneration(transformers.T5Config(**settings))
    settings = {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336}
    settings |= {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
    settings |= {"rope_theta": 500000.0, "use_cache": False}
    lora = peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    base: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings))
    base = base.to(torch.bfloat16)
    if recomputes:
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        base.enable_input_require_grads()
    return peft.get_peft_model(base, lora)


def loss_of(out: Any) -> torch.Tensor:
    """The loss of a model's output."""
    loss: torch.Tensor = out if isinstance(out, torch.Tensor) else out.loss
    return loss


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The members of its longest lists of layers."""
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
    most = max(map(len, lists))
    return [layer for found in lists if len(found) == most for layer in found]


Step = Callable[[dict[str, torch.Tensor]], torch.Tensor]


def ours(args: argparse.Namespace) -> Step:
    """As the README has it."""
    bmt.init_distributed(seed=0)
    model = bmt.BMTrainModelWrapper(model_of(args.model, torch.bfloat16, recomputes=False))
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = bmt.optim.AdamOptimizer(trained, lr=1e-4, weight_decay=0.01)
    manager = bmt.optim.OptimManager(loss_scale=None)
    manager.add_optimizer(optimizer)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        manager.zero_grad()
        loss = loss_of(model(**batch))
        manager.backward(loss)
        manager.clip_grad_norm(optimizer.param_groups, max_norm=1.0)
        manager.step()
        return loss.detach()

    return step


def plain(args: argparse.Namespace) -> Step:
    """PyTorch on one GPU, DDP on several: fp32 weights under bf16 autocast, compiled whole."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    torch.set_float32_matmul_precision("high")
    is_lora = args.model.endswith("lora")
    model = model_of(args.model, torch.bfloat16 if is_lora else torch.float32, args.recomputes)
    params = [param for param in model.parameters() if param.requires_grad]
    if dist.get_world_size() > 1:
        model = nn.parallel.DistributedDataParallel(model)
    if is_lora:
        for layer in layers_of(model):
            layer.compile()
        compiled: Any = model
    else:
        compiled = torch.compile(model, mode=args.mode)
    optimizer = torch.optim.AdamW(params, lr=1e-4, fused=True)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=not is_lora):
            loss = loss_of(compiled(**batch))
        loss.backward()
        nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def fsdp2(args: argparse.Namespace) -> Step:
    """`fully_shard` of each layer and of the model, layers compiled, fp32 masters."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    model = model_of(args.model, torch.float32, recomputes=False)
    for parent in list(model.modules()):
        if isinstance(parent, nn.ModuleList):
            for index, layer in enumerate(parent):
                parent[index] = checkpoint_wrapper(layer) if args.recomputes else layer
    for layer in layers_of(model):
        layer.compile(mode=args.mode)
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = loss_of(model(**batch))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


BACKENDS: dict[str, Callable[[argparse.Namespace], Step]] = {
    "ours": ours,
    "plain": plain,
    "fsdp2": fsdp2,
}


def batch_of(name: str, rows: int) -> dict[str, torch.Tensor]:
    """Ids and labels (rows, tokens) of this rank."""
    seq = GEOMETRIES[name].seq if name in GEOMETRIES else TRANSFORMERS[name]
    vocab = {"bert-large": 30528, "t5-base": 32128, "gpt2": 50304}.get(name, 128256)
    ids = torch.randint(0, vocab, (rows, seq + 1), device="cuda")
    return {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}


def measure(args: argparse.Namespace) -> None:
    """Median of the steps after warm-up, with the device idle before and after each."""
    begun = time.time()
    step = BACKENDS[args.backend](args)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for rows in args.batch:
        torch.manual_seed(rank)
        record: dict[str, Any] = {
            "what": "as written",
            "backend": args.backend,
            "mode": args.mode,
            "model": args.model,
        }
        record |= {"gpus": world, "rows": rows, "recomputes": args.recomputes}
        batch, times, first = batch_of(args.model, rows), [], 0.0
        torch.cuda.reset_peak_memory_stats()
        try:
            for number in range(args.warmup + args.steps):
                torch.cuda.synchronize()
                start = time.perf_counter()
                loss = step(batch)
                torch.cuda.synchronize()
                first = first or time.time() - begun
                times += [time.perf_counter() - start] if number >= args.warmup else []
        except torch.OutOfMemoryError:
            record["failed"] = "out of memory"
        else:
            seconds = statistics.median(times)
            record |= {
                "step_ms": round(1e3 * seconds, 2),
                "tokens_per_s": round(batch["labels"].numel() / seconds),
                "loss": round(float(loss), 4),
                "first_step_s": round(first, 1),
                "peak_gib": round(torch.cuda.max_memory_allocated() / GIB, 2),
                "reserved_gib": round(torch.cuda.max_memory_reserved() / GIB, 2),
            }
        if rank == 0:
            print(RESULT + json.dumps(record), flush=True)
    os._exit(0)


# Which runs are compared: (GPUs, words of `measure`).
OURS, PLAIN, GRAPHED = "ours", "plain", "plain --mode reduce-overhead"
SUITES: dict[str, tuple[int, str, Sequence[str]]] = {
    "gpt2-one-gpu": (1, "gpt2 --batch 8 32", (OURS, PLAIN, GRAPHED)),
    "gpt2-two-gpus": (2, "gpt2 --batch 8 32", (OURS, PLAIN, GRAPHED)),
    "bert-one-gpu": (1, "bert-large --batch 256", (OURS, PLAIN)),
    "t5-one-gpu": (1, "t5-base --batch 16", (OURS, PLAIN)),
    "bert-two-gpus": (2, "bert-large --batch 256", (OURS, PLAIN)),
    "t5-two-gpus": (2, "t5-base --batch 16", (OURS, PLAIN)),
    "llama-two-gpus": (2, "llama-8b --batch 3", (OURS, "fsdp2 --recomputes")),
    "lora-one-gpu": (1, "llama-8b-lora --batch 1 2", (OURS, PLAIN, "plain --recomputes")),
}


def run_suite(name: str, limit: float) -> list[dict[str, Any]]:
    """The records of a suite; a run that ends without one says so."""
    gpus, words, backends = SUITES[name]
    records = []
    for backend in backends:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc_per_node={gpus}", __file__, "--measure", *words.split()]
        command += ["--backend", *backend.split()]
        try:
            done = subprocess.run(
                command, check=False, capture_output=True, text=True, timeout=limit
            )
            text, told = done.stdout, done.stderr[-400:]
        except subprocess.TimeoutExpired as error:
            text, told = str(error.stdout or b"", "utf-8"), f"longer than {limit:.0f} s"
        found = [json.loads(x.removeprefix(RESULT)) for x in text.splitlines() if RESULT in x]
        if not found:
            found = [
                {
                    "what": "as written",
                    "backend": backend,
                    "model": words.split()[0],
                    "failed": told,
                }
            ]
        for record in found:
            print(json.dumps(record), flush=True)
        records += [{"suite": name, **record} for record in found]
    return records


def ratios(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Ours over the fastest peer, by suite and rows."""
    rates: dict[tuple[Any, ...], dict[str, float]] = collections.defaultdict(dict)
    for each in records:
        if "tokens_per_s" in each:
            words = [each["backend"], each["mode"], "recomputed" if each["recomputes"] else None]
            peer = " ".join(word for word in words if word)
            rates[each["suite"], each["rows"]][peer] = each["tokens_per_s"]
    out = []
    for (suite, rows), found in rates.items():
        peers = {name: rate for name, rate in found.items() if name != OURS}
        if OURS in found and peers:
            best = max(peers, key=peers.__getitem__)
            ratio = round(found[OURS] / peers[best], 3)
            out.append({"suite": suite, "rows": rows, "fastest_peer": best, "ratio": ratio})
    return out


def main() -> None:
    """Measure one backend, or run suites and write their records."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="+", help=f"suites: {', '.join(SUITES)}; or a model")
    parser.add_argument("--measure", action="store_true", help="one backend, in these processes")
    parser.add_argument("--backend", choices=BACKENDS, default="ours")
    parser.add_argument("--mode", help="of torch.compile, for peers")
    parser.add_argument("--recomputes", action="store_true", help="peers recompute each layer")
    parser.add_argument("--batch", type=int, nargs="+", default=[8])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=6)
    parser.add_argument("--limit", type=float, default=200, help="seconds of one run")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--out", type=pathlib.Path)
    args = parser.parse_args()
    if args.measure:
        (args.model,) = args.names
        measure(args)
    records = [record for name in args.names for record in run_suite(name, args.limit)]
    found = ratios(records)
    for each in found:
        print(json.dumps(each))
    if args.out is not None:
        command = f"python benchmarks/as_written.py {' '.join(args.names)}"
        facts = machine_from_outside()
        report = report_of(
            records, commit=args.commit, command=command, machine=facts, ratios=found
        )
        write(report, args.out)


if __name__ == "__main__":
    main()
