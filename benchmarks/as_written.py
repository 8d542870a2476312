"""A stranger's own modules, without an option, beside PyTorch, DDP and FSDP2 at their best.

python benchmarks/as_written.py gpt2-one-gpu gpt2-two-gpus --out benchmarks/results/as-written.json
python benchmarks/as_written.py t5-two-gpus --peers ours plain --limit 110 --out FILE
python benchmarks/as_written.py t5-two-gpus --peers fsdp2 --limit 110 --out FILE --add
python benchmarks/as_written.py --list

Models are plain layers in a ModuleList with head and loss in `forward`, or those of transformers.
Ours: one call of BMTrainModelWrapper, AdamOptimizer and OptimManager. The peers compile and clip;
each runs in processes of its own, one after the other, on the same cards, with the compiler's
caches in a new folder: what is measured begins cold. With --warm each is started once more with
those caches, for one step. Seconds to the first step count from the start of a rank's process.

The file is written after every run. `--add` puts records beside those of an earlier call on the
same machine and commit, so that a suite may take several calls; a repeated run replaces its record.
--tiny makes all models small, to try the programs on CPUs.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import os
import pathlib
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import peft
import psutil
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from machine import machine, machine_from_outside
from reports import report_of, write
from runs import finishes, last_words, why_it_failed
from startup import code_in
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

import bmtrain as bmt
from model_center.layer.mask import AttentionMask
from model_center.model import Qwen3, Qwen3Config
from model_center.training.adapters import ALL, Lora

GIB = 2**30
RESULT = "RESULT "
TOLERATED = 0.05  # how much slower than the saved results is no regression
LEAST = 20  # seconds: nothing is measured in less
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# NVLink multicast stays off: a program that uses it can put GPUs out of service that others share.
# Compiled by themselves too: a layer that the compiler gives up, under a checkpoint for example,
# would make tensors of all pairs of tokens.
FLEX_ATTENTION: Any = torch.compile(flex_attention)
MAKE_MASK: Any = torch.compile(create_block_mask)
WITHOUT_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}


@dataclasses.dataclass(frozen=True)
class Geometry:
    """Of a decoder. `kv_heads` is set for models like Llama, `head_dim` for those like Qwen3, which
    norm heads and whose head is the embedding.
    """

    layers: int
    dim: int
    heads: int
    hidden: int
    seq: int
    vocab: int
    kv_heads: int | None = None
    head_dim: int | None = None

    def tiny(self) -> Geometry:
        """To try the programs."""
        kv_heads, head_dim = self.kv_heads and 2, self.head_dim and 32
        return Geometry(2, 64, 4, 128, 320 if head_dim else 32, 512, kv_heads, head_dim)


GEOMETRIES = {
    "gpt2": Geometry(12, 768, 12, 3072, 1024, 50304),
    "1b": Geometry(16, 2048, 32, 8192, 4096, 128256, kv_heads=8),
    "llama-8b": Geometry(32, 4096, 32, 14336, 4096, 128256, kv_heads=8),
    "llama-8b-8k": Geometry(32, 4096, 32, 14336, 8192, 128256, kv_heads=8),
    "13b": Geometry(40, 5120, 128, 20480, 512, 50304),
    "qwen3-4b": Geometry(36, 2560, 32, 9728, 16384, 151936, kv_heads=8, head_dim=128),
}
TRANSFORMERS = {"bert-large": 128, "t5-base": 512, "llama-8b-lora": 4096}  # tokens of a row


def rotated(x: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
    """(batch, heads, tokens, dim), turned by `positions` (batch, tokens), or by all places."""
    half = x.shape[-1] // 2
    rates = 500000.0 ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    places = torch.arange(x.shape[-2], device=x.device) if positions is None else positions[:, None]
    angles = places.float()[..., None] * rates
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Flex:
    """Packed rows, as an expert of PyTorch has them: a mask of blocks for all layers."""

    @staticmethod
    def shown(segments: torch.Tensor) -> BlockMask:
        """Which pairs are seen, of segments (batch, tokens)."""

        def mask_mod(b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
            return (k <= q) & (segments[b, q] == segments[b, k])

        rows, seq = segments.shape
        return MAKE_MASK(mask_mod, rows, None, seq, seq, device=DEVICE)

    @staticmethod
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, shown: Any) -> torch.Tensor:
        """Of (batch, heads, tokens, dim)."""
        return FLEX_ATTENTION(q, k, v, block_mask=shown, enable_gqa=True)


class Ours:
    """The same by this library's function."""

    shown = staticmethod(lambda segments: segments)
    attend = staticmethod(bmt.nn.segment_attention)


class Layer(nn.Module):
    """A layer of GPT-2, Llama or Qwen3."""

    def __init__(self, g: Geometry, packed: type[Flex | Ours]) -> None:
        super().__init__()
        self.is_llama, self.dim = g.kv_heads is not None, g.head_dim or g.dim // g.heads
        self.attend = packed.attend
        self.norm_q, self.norm_k = (
            nn.RMSNorm(g.head_dim, eps=1e-6) if g.head_dim else nn.Identity() for _ in range(2)
        )
        own, norm = self.dim * (g.kv_heads or g.heads), nn.RMSNorm if g.kv_heads else nn.LayerNorm
        bias = not self.is_llama
        self.norm1, self.norm2 = norm(g.dim, eps=1e-5), norm(g.dim, eps=1e-5)
        self.q = nn.Linear(g.dim, self.dim * g.heads, bias=bias)
        self.o = nn.Linear(self.dim * g.heads, g.dim, bias=bias)
        self.k, self.v = (nn.Linear(g.dim, own, bias=bias) for _ in range(2))
        self.up, self.down = (
            nn.Linear(g.dim, g.hidden, bias=bias),
            nn.Linear(g.hidden, g.dim, bias=bias),
        )
        if self.is_llama:
            self.gate = nn.Linear(g.dim, g.hidden, bias=False)

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor | None = None, shown: Any = None
    ) -> torch.Tensor:
        h = self.norm1(x)
        q, k, v = (
            p(h).unflatten(-1, (-1, self.dim)).transpose(1, 2) for p in (self.q, self.k, self.v)
        )
        if self.is_llama:
            q, k = rotated(self.norm_q(q), positions), rotated(self.norm_k(k), positions)
        if shown is None:
            a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.is_llama)
        else:
            a = self.attend(q, k, v, shown)
        x = x + self.o(a.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        if self.is_llama:
            return x + self.down(F.silu(self.gate(h)) * self.up(h))
        return x + self.down(F.gelu(self.up(h), approximate="tanh"))


class Decoder(nn.Module):
    """Gives the loss. `recomputes` is for peers that do not decide that by themselves."""

    def __init__(
        self, g: Geometry, recomputes: bool = False, packed: type[Flex | Ours] = Flex
    ) -> None:
        super().__init__()
        self.recomputes, self.vocab, self.shown = recomputes, g.vocab, packed.shown
        self.tokens = nn.Embedding(g.vocab, g.dim)
        self.positions = None if g.kv_heads else nn.Embedding(g.seq, g.dim)
        self.layers = nn.ModuleList(Layer(g, packed) for _ in range(g.layers))
        self.norm = (nn.RMSNorm if g.kv_heads else nn.LayerNorm)(g.dim, eps=1e-5)
        self.head = nn.Linear(g.dim, g.vocab, bias=False)
        if g.head_dim:
            self.head.weight = self.tokens.weight

    def forward(
        self,
        input_ids: torch.Tensor,
        labels: torch.Tensor,
        segments: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        x = self.tokens(input_ids)
        packed = () if segments is None else (positions, self.shown(segments))
        if self.positions is not None:
            x = x + self.positions(torch.arange(input_ids.shape[1], device=x.device))
        for layer in self.layers:
            if self.recomputes:
                x = torch.utils.checkpoint.checkpoint(layer, x, *packed, use_reentrant=False)
            else:
                x = layer(x, *packed)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.view(-1, self.vocab), labels.reshape(-1))


def model_of(args: argparse.Namespace, dtype: torch.dtype, recomputes: bool) -> nn.Module:
    """The model on this rank's GPU, with the same values on all."""
    torch.manual_seed(0)
    with torch.device(DEVICE):
        if args.model.removesuffix("-lora") in GEOMETRIES:
            packed = Ours if args.backend == "ours" else Flex
            model: nn.Module = Decoder(geometry_of(args), recomputes, packed)
        else:
            model = of_transformers(args.model, recomputes, tiny=args.tiny)
    if args.model == "qwen3-4b-lora":
        names = ["q", "k", "v", "o", "gate", "up", "down"]
        lora = peft.LoraConfig(r=16, lora_alpha=32, target_modules=names)
        peft.inject_adapter_in_model(lora, model.bfloat16())
    with torch.no_grad():
        for param in model.parameters():
            _ = param.normal_(0, 0.02) if param.dim() > 1 else param.fill_(0.5)
    # Masters of all begin at numbers of bf16. A step of 1e-4 is about what these are apart: from
    # other numbers the losses of the first steps would differ by some hundredths.
    return model.bfloat16().to(dtype)


def geometry_of(args: argparse.Namespace) -> Geometry:
    """Of the model, or with --tiny a small one of its kind."""
    found = GEOMETRIES[args.model.removesuffix("-lora")]
    return found.tiny() if args.tiny else found


TINY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 512}
TINY |= {"intermediate_size": 128, "num_key_value_heads": 2}


def of_transformers(name: str, recomputes: bool, *, tiny: bool = False) -> nn.Module:
    """BERT-large for masked tokens, T5-base, or Llama-3-8B with LoRA by peft."""
    settings: dict[str, Any]
    if name == "bert-large":
        settings = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16}
        settings |= {"intermediate_size": 4096, "vocab_size": 30528}
        settings |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        settings |= TINY if tiny else {}
        return transformers.BertForMaskedLM(transformers.BertConfig(**settings))
    if name == "t5-base":
        settings = {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12}
        settings |= {"dropout_rate": 0.0, "use_cache": False}
        settings |= {"decoder_start_token_id": 0, "pad_token_id": 0}
        few = {"d_model": 64, "d_ff": 128, "num_layers": 2, "num_heads": 4, "d_kv": 16}
        settings |= few | {"vocab_size": 512} if tiny else {}
        return transformers.T5ForConditionalGeneration(transformers.T5Config(**settings))
    settings = {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336}
    settings |= {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
    settings |= {"rope_theta": 500000.0, "use_cache": False}
    settings |= TINY if tiny else {}
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
    """As the README has it; with --options, what they gain."""
    bmt.init_distributed(seed=0, fp8=args.options == "fp8", device=DEVICE)
    model = bmt.BMTrainModelWrapper(model_of(args, torch.bfloat16, recomputes=False))
    trained = [param for param in model.parameters() if param.requires_grad]
    small: Any = {"moments": "8bit", "master_weights": "split"} if args.options == "small" else {}
    optimizer = bmt.optim.AdamOptimizer(trained, lr=1e-4, weight_decay=0.01, **small)
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


def center(args: argparse.Namespace) -> Step:
    """Qwen3 of `model_center`, as `python -m model_center train` computes it."""
    bmt.init_distributed(seed=0, device=DEVICE)
    g = geometry_of(args)
    config = Qwen3Config(
        vocab_size=g.vocab,
        dim_model=g.dim,
        num_heads=g.heads,
        num_heads_kv=g.kv_heads or g.heads,
        dim_head=g.head_dim or g.dim // g.heads,
        dim_ff=g.hidden,
        num_layers=g.layers,
        tied=True,
        dtype=torch.bfloat16,
    )
    model = Qwen3(config)
    bmt.init_parameters(model)
    if args.model.endswith("lora"):
        Lora(model, 16, 32, 0.0, [ALL], "")
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = bmt.optim.AdamOptimizer(trained, lr=1e-4, weight_decay=0.01)
    manager = bmt.optim.OptimManager(loss_scale=None)
    manager.add_optimizer(optimizer)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        manager.zero_grad()
        named: dict[str, Any] = {"output_logits": False}
        if "segments" in batch:
            named["attention_mask"] = AttentionMask(causal=True, segments=batch["segments"])
            named["position_ids"] = batch["positions"]
        hidden = model(batch["input_ids"], **named).last_hidden_state
        is_counted = batch["labels"] != -100
        targets = batch["labels"].clamp(min=0).flatten()
        found = model.log_probs(hidden.flatten(0, 1), targets)
        loss = -(found * is_counted.flatten()).sum() / is_counted.sum()
        manager.backward(loss)
        manager.clip_grad_norm(optimizer.param_groups, max_norm=1.0)
        manager.step()
        return loss.detach()

    return step


def join() -> None:
    """The other processes, as programs of PyTorch do."""
    if DEVICE == "cpu":
        dist.init_process_group("gloo")
        return
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    # Memory that NCCL allocates needs its communicator from the start.
    dist.init_process_group("nccl", device_id=device)


def plain(args: argparse.Namespace) -> Step:
    """PyTorch on one GPU, DDP on several: fp32 weights under bf16 autocast, compiled whole."""
    join()
    torch.set_float32_matmul_precision("high")
    is_lora = args.model.endswith("lora")
    model = model_of(args, torch.bfloat16 if is_lora else torch.float32, args.recomputes)
    params = [param for param in model.parameters() if param.requires_grad]
    if dist.get_world_size() > 1:
        model = nn.parallel.DistributedDataParallel(model)
    if is_lora:
        for layer in layers_of(model):
            layer.compile(mode=args.mode)
        compiled: Any = model
    else:
        compiled = torch.compile(model, mode=args.mode)
    optimizer = torch.optim.AdamW(params, lr=1e-4, fused=True)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=not is_lora):
            loss = loss_of(compiled(**batch))
        loss.backward()
        nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def fsdp2(args: argparse.Namespace) -> Step:
    """`fully_shard` of each layer and of the model, layers compiled, fp32 masters."""
    join()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    model = model_of(args, torch.float32, recomputes=False)
    for parent in list(model.modules()):
        if isinstance(parent, nn.ModuleList):
            for index, layer in enumerate(parent):
                if args.packed:  # the compiler gives up a checkpoint that is given a mask of blocks
                    layer.compile(mode=args.mode)
                parent[index] = checkpoint_wrapper(layer) if args.recomputes else layer
    for layer in layers_of(model):
        if not args.packed:
            layer.compile(mode=args.mode)
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    if args.symmetric:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                communicate_symmetrically(module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = loss_of(model(**batch))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def communicate_symmetrically(module: FSDPModule) -> None:
    """Buffers of symmetric memory; before torch 2.12 those that NCCL allocates and registers."""
    name = "set_symm_mem_for_comm"
    if hasattr(module, name):
        getattr(module, name)()
    else:
        module.set_allocate_memory_from_process_group_for_comm(True)


BACKENDS: dict[str, Callable[[argparse.Namespace], Step]] = {
    "ours": ours,
    "center": center,
    "plain": plain,
    "fsdp2": fsdp2,
}


def lengths_of(rows: int, seq: int) -> torch.Tensor:
    """Tokens of this rank's rows: log-normal around half of a row, one seed for all peers."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    drawn = torch.randn(world * rows, generator=torch.Generator().manual_seed(0))
    found = (drawn.mul(0.6).exp() * seq / 2).round().long().clamp(min(16, seq), seq)
    return found.chunk(world)[rank]


def packed_rows(rows: int, seq: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers of conversations, and places in them, of this rank's rows (rows, tokens). Lengths are
    uniform from 200 to 4,000 tokens of 16,384; the last of a row is cut.
    """
    draw = torch.Generator().manual_seed(int(os.environ["RANK"]))
    least, most = seq * 200 // 16384, seq * 4000 // 16384
    lengths = torch.randint(least, most + 1, (rows, -(-seq // least)), generator=draw)
    ends = lengths.cumsum(1)
    places = torch.arange(seq).expand(rows, seq).contiguous()
    segments = torch.searchsorted(ends, places, right=True)
    return segments, places - F.pad(ends, (1, 0)).gather(1, segments)


def batch_of(args: argparse.Namespace, rows: int) -> dict[str, torch.Tensor]:
    """Ids and labels (rows, tokens) of this rank; with --padded a mask of what is no padding, with
    --packed segments and the positions in them.
    """
    if args.model.removesuffix("-lora") in GEOMETRIES:
        seq, vocab = geometry_of(args).seq, geometry_of(args).vocab
    else:
        seq = 32 if args.tiny else TRANSFORMERS[args.model]
        vocab = {"bert-large": 30528, "t5-base": 32128}.get(args.model, 128256)
        vocab = 512 if args.tiny else vocab
    ids = torch.randint(0, vocab, (rows, seq + 1), device=DEVICE)
    batch = {"input_ids": ids[:, :-1].clone(), "labels": ids[:, 1:].clone()}
    if args.padded:
        mask = torch.arange(seq) < lengths_of(rows, seq)[:, None]
        batch["attention_mask"] = mask.long().to(DEVICE)
        batch["labels"].masked_fill_(~mask.to(DEVICE), -100)
    if args.packed:
        segments, positions = (x.to(DEVICE) for x in packed_rows(rows, seq))
        batch |= {"segments": segments, "positions": positions}
        batch["labels"][:, :-1].masked_fill_(segments[:, 1:] != segments[:, :-1], -100)
    return batch


def idle() -> None:
    """Wait until the device has done everything."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def measure(args: argparse.Namespace) -> None:
    """Median of the steps after warm-up, with the device idle before and after each."""
    step = BACKENDS[args.backend](args)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    first = 0.0
    for rows in args.batch:
        torch.manual_seed(rank)
        record: dict[str, Any] = {"rows": rows}
        batch, times = batch_of(args, rows), []
        if DEVICE == "cuda":
            torch.cuda.reset_peak_memory_stats()
        try:
            for number in range(args.warmup + args.steps):
                idle()
                start = time.perf_counter()
                loss = step(batch)
                idle()
                if not first:
                    first = time.time() - psutil.Process().create_time()
                    record["first_step_s"] = round(first, 1)
                times += [time.perf_counter() - start] if number >= args.warmup else []
        except torch.OutOfMemoryError:
            record["failed"] = "out of memory"
        else:
            record |= rates(batch, statistics.median(times), world) | {
                "loss": round(float(loss), 4)
            }
        if rank == 0:
            print(RESULT + json.dumps(record), flush=True)
    os._exit(0)


def rates(batch: Mapping[str, torch.Tensor], seconds: float, world: int) -> dict[str, Any]:
    """Tokens a second and GPU, with padding and, where there is some, without; peaks of memory."""
    found: dict[str, Any] = {
        "step_ms": round(1e3 * seconds, 2),
        "tokens_per_s": round(batch["labels"].numel() / seconds),
    }
    if "attention_mask" in batch:
        real = batch["attention_mask"].sum()
        dist.all_reduce(real)  # rows of ranks differ in length
        found["real_tokens_per_s"] = round(float(real) / world / seconds)
    if DEVICE == "cuda":
        found["peak_gib"] = round(torch.cuda.max_memory_allocated() / GIB, 2)
        found["reserved_gib"] = round(torch.cuda.max_memory_reserved() / GIB, 2)
    return found


# What runs: a name for --peers, and words of `measure`.
PEERS = {
    "ours": "ours",
    "center": "center",
    "ours-fp8": "ours --options fp8",
    "ours-small": "ours --options small",
    "plain": "plain",
    "plain-graphs": "plain --mode reduce-overhead",
    "plain-recomputed": "plain --recomputes",
    "fsdp2": "fsdp2",
    "fsdp2-graphs": "fsdp2 --mode reduce-overhead",
    "fsdp2-recomputed": "fsdp2 --recomputes",
    "fsdp2-symmetric": "fsdp2 --symmetric",
    "fsdp2-symmetric-recomputed": "fsdp2 --symmetric --recomputes",
}


@dataclasses.dataclass(frozen=True)
class Suite:
    """Runs of one model that are compared with one another.

    Attributes:
        gpus: how many.
        words: the model and its batches, arguments of `measure`.
        peers: names of PEERS.
    """

    gpus: int
    words: str
    peers: Sequence[str]


ALONE = ("ours", "plain", "plain-graphs")
SEVERAL = ("ours", "plain", "plain-graphs", "fsdp2", "fsdp2-graphs", "fsdp2-symmetric")
LARGE = (
    *("ours", "ours-fp8", "ours-small", "fsdp2", "fsdp2-symmetric"),
    *("fsdp2-recomputed", "fsdp2-symmetric-recomputed"),
)
PACKED = ("ours", "center", "fsdp2-recomputed")
PACKED_LORA = ("ours", "center", "plain", "plain-recomputed")
SUITES = {
    "gpt2-one-gpu": Suite(1, "gpt2 --batch 8 32", ALONE),
    "gpt2-two-gpus": Suite(2, "gpt2 --batch 8 32", SEVERAL),
    "bert-one-gpu": Suite(1, "bert-large --batch 256", ALONE),
    "bert-padded-one-gpu": Suite(1, "bert-large --batch 256 --padded", ALONE),
    "bert-two-gpus": Suite(2, "bert-large --batch 256", SEVERAL),
    "bert-padded-two-gpus": Suite(2, "bert-large --batch 256 --padded", SEVERAL),
    "t5-one-gpu": Suite(1, "t5-base --batch 16", ALONE),
    "t5-padded-one-gpu": Suite(1, "t5-base --batch 16 --padded", ALONE),
    "t5-two-gpus": Suite(2, "t5-base --batch 16", SEVERAL),
    "t5-padded-two-gpus": Suite(2, "t5-base --batch 16 --padded", SEVERAL),
    "1b-one-gpu": Suite(1, "1b --batch 4", ALONE),
    "1b-two-gpus": Suite(2, "1b --batch 4", SEVERAL),
    "1b-four-gpus": Suite(4, "1b --batch 4", SEVERAL),
    "gpt2-four-gpus": Suite(4, "gpt2 --batch 8 32", SEVERAL),
    "packed-two-gpus": Suite(2, "qwen3-4b --batch 1 --packed", PACKED),
    "causal-two-gpus": Suite(2, "qwen3-4b --batch 1", PACKED),
    "packed-lora-one-gpu": Suite(1, "qwen3-4b-lora --batch 1 --packed", PACKED_LORA),
    "causal-lora-one-gpu": Suite(1, "qwen3-4b-lora --batch 1", PACKED_LORA),
    "llama-two-gpus": Suite(2, "llama-8b --batch 3", LARGE),
    "llama-four-gpus": Suite(4, "llama-8b --batch 3", LARGE),
    "llama-8k-four-gpus": Suite(4, "llama-8b-8k --batch 2", LARGE),
    "13b-four-gpus": Suite(4, "13b --batch 8 16 24 32", LARGE),
    "lora-one-gpu": Suite(1, "llama-8b-lora --batch 1 2", (*ALONE, "plain-recomputed")),
}


def common_of(words: Sequence[str], gpus: int) -> dict[str, Any]:
    """What all records of a run say."""
    args = parser().parse_args([*words])
    common = {"what": "as written", "backend": args.backend, "mode": args.mode}
    common |= {"model": args.names[0], "gpus": gpus, "recomputes": args.recomputes}
    # Where they are off, records look as those of before these were there.
    apart = {"padded": args.padded, "packed": args.packed}
    apart |= {"symmetric": args.symmetric, "options": args.options}
    return common | {name: value for name, value in apart.items() if value}


def run(
    suite: Suite, peer: str, limit: float, *, warm: bool, extra: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """The records of one peer, cold and perhaps warm; what ends without one says so."""
    words = [*shlex.split(suite.words), "--backend", *shlex.split(PEERS[peer]), *extra]
    common = common_of(words, suite.gpus)
    batches = parser().parse_args(words).batch
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        began = time.monotonic()
        found, failure = started(suite.gpus, words, limit, folder)
        if len(found) < len(batches):
            found.append({"rows": batches[len(found)], "failed": failure})
        left = limit - (time.monotonic() - began)
        if warm and "first_step_s" in found[0]:
            found[0]["compiled"] = len(before := code_in(folder))
            once = [*words, "--batch", str(batches[0]), "--warmup", "0", "--steps", "1"]
            again, _ = started(suite.gpus, once, left, folder)
            if again and "first_step_s" in again[0]:
                found[0]["warm_first_step_s"] = again[0]["first_step_s"]
                found[0]["warm_compiled"] = len(code_in(folder) - before)
    return [common | record for record in found]


def started(
    gpus: int, words: Sequence[str], limit: float, folder: pathlib.Path
) -> tuple[list[dict[str, Any]], str]:
    """What rank 0 has measured, and why something is missing. Caches are in the folder."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc_per_node={gpus}", __file__, "--measure", *words]
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(folder), "TRITON_CACHE_DIR": str(folder / "triton")}
    with tempfile.TemporaryDirectory() as name:
        log = pathlib.Path(name, "log")
        in_time = finishes(command, log, limit, caches | WITHOUT_MULTICAST)
        text = log.read_text(errors="replace")
    found = [json.loads(x.partition(RESULT)[2]) for x in text.splitlines() if RESULT in x]
    if not found:
        print("\n".join("    | " + line for line in last_words(text)), flush=True)
    return found, why_it_failed(text) if in_time else f"longer than {limit:.0f} s"


def variant_of(record: Mapping[str, Any]) -> str:
    """A peer in words."""
    words = [record["backend"], record["mode"], "recomputed" if record["recomputes"] else None]
    words += ["symmetric" if record.get("symmetric") else None, record.get("options")]
    return " ".join(word for word in words if word)


def ratios(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Ours over the fastest peer, by suite and rows."""
    found: dict[tuple[Any, ...], dict[str, float]] = collections.defaultdict(dict)
    for each in records:
        if "tokens_per_s" in each:
            found[each["suite"], each["rows"]][variant_of(each)] = each["tokens_per_s"]
    out = []
    for (suite, rows), speeds in found.items():
        peers = {x: rate for x, rate in speeds.items() if x.split()[0] not in ("ours", "center")}
        if "ours" in speeds and peers:
            best = max(peers, key=peers.__getitem__)
            ratio = round(speeds["ours"] / peers[best], 3)
            out.append({"suite": suite, "rows": rows, "fastest_peer": best, "ratio": ratio})
    return out


def saved_rates(gpu: object) -> dict[tuple[Any, ...], float]:
    """Tokens a second and GPU in the newest results that are kept, of this kind of GPU, by suite,
    variant and rows.
    """
    paths = pathlib.Path(__file__).with_name("results").glob("as-written*.json")
    reports = [json.loads(path.read_text()) for path in paths]
    reports.sort(key=lambda report: (report["date"], report.get("time", "")))
    return {
        (each["suite"], variant_of(each), each["rows"]): each["tokens_per_s"]
        for report in reports
        if report["machine"]["gpu"] == gpu
        for each in report["records"]
        if "tokens_per_s" in each
    }


def compare(record: dict[str, Any], suite: str, saved: Mapping[tuple[Any, ...], float]) -> None:
    """Put beside a record how many times as fast it is as the saved one; say where it is slower."""
    before = saved.get((suite, variant_of(record), record["rows"]))
    if before is None or "tokens_per_s" not in record:
        return
    record["of_saved"] = round(record["tokens_per_s"] / before, 3)
    if record["of_saved"] < 1 - TOLERATED:
        text = f"{suite}, {variant_of(record)}, {record['rows']} rows: {record['of_saved']:.2f} x"
        print(f"SLOWER than the saved results: {text}", flush=True)


def merged(
    old: Sequence[dict[str, Any]], new: Sequence[dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Both; of runs that were repeated the new records."""
    repeated = {(each["suite"], variant_of(each)) for each in new}
    yield from (each for each in old if (each["suite"], variant_of(each)) not in repeated)
    yield from new


def earlier(path: pathlib.Path, commit: str, facts: Mapping[str, object]) -> list[dict[str, Any]]:
    """The records of an earlier call, for --add.

    Raises:
        SystemExit: if they are of another commit or machine: their ratio would mean nothing.
    """
    if not path.exists():
        return []
    report = json.loads(path.read_text())
    for name, own in (("commit", commit), ("machine", facts)):
        if report[name] != own:
            raise SystemExit(f"--add: {path} has {name} {report[name]}, this is {own}.")
    return list(report["records"])


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("names", nargs="*", help="suites; with --measure a model")
    found.add_argument("--gpus", type=int, nargs="+", help="all suites for so many")
    found.add_argument("--list", action="store_true", help="say which suites and peers there are")
    found.add_argument("--peers", nargs="+", choices=PEERS, help="only these of each suite")
    found.add_argument("--limit", type=float, default=200, help="seconds of one peer's run")
    found.add_argument(
        "--within", type=float, default=float("inf"), help="seconds of all: the rest is left out"
    )
    found.add_argument("--warm", action="store_true", help="start each again, with warm caches")
    found.add_argument("--add", action="store_true", help="keep the records that --out has")
    found.add_argument("--out", type=pathlib.Path)
    found.add_argument("--commit", default="unknown")
    found.add_argument("--measure", action="store_true", help="one backend, in these processes")
    found.add_argument("--backend", choices=BACKENDS, default="ours")
    found.add_argument("--mode", help="of torch.compile, for peers")
    found.add_argument("--recomputes", action="store_true", help="peers recompute each layer")
    found.add_argument("--symmetric", action="store_true", help="FSDP2 with symmetric memory")
    found.add_argument("--options", choices=("fp8", "small"), help="of ours; small: Adam's states")
    found.add_argument("--batch", type=int, nargs="+", default=[8])
    found.add_argument("--padded", action="store_true", help="rows of real lengths, with a mask")
    found.add_argument("--packed", action="store_true", help="rows of several conversations")
    found.add_argument("--steps", type=int, default=8)
    found.add_argument("--warmup", type=int, default=6)
    found.add_argument("--tiny", action="store_true", help="small models, to try the programs")
    return found


def main() -> None:
    """Measure one backend, or run suites and write their records."""
    args = parser().parse_args()
    if args.measure:
        (args.model,) = args.names
        measure(args)
    args.names += [name for name, suite in SUITES.items() if suite.gpus in (args.gpus or ())]
    unknown = set(args.names) - SUITES.keys()
    if args.list or unknown or not args.names:
        for name, suite in SUITES.items():
            print(f"{name:22} {suite.gpus} GPUs: {', '.join(suite.peers)}")
        raise SystemExit(f"no suite {', '.join(sorted(unknown))}" if unknown else 0)
    facts = machine_from_outside() if DEVICE == "cuda" else machine("cpu")
    saved = saved_rates(facts["gpu"])
    records = earlier(args.out, args.commit, facts) if args.add and args.out else []
    began = time.monotonic()
    extra = [f"--steps={args.steps}", f"--warmup={args.warmup}", *(["--tiny"] if args.tiny else [])]
    for name in args.names:
        for peer in args.peers or SUITES[name].peers:
            limit = min(args.limit, args.within - (time.monotonic() - began))
            if limit < LEAST:
                print(f"{name}, {peer}: left out, {args.within:.0f} s are over", flush=True)
                continue
            found = run(SUITES[name], peer, limit, warm=args.warm, extra=extra)
            for record in found:
                compare(record, name, saved)
                print(json.dumps(record), flush=True)
            records = [*merged(records, [{"suite": name, **record} for record in found])]
            if args.out is not None:
                save(records, args, facts)
    for each in ratios(records):
        print(json.dumps(each))


def save(
    records: Sequence[dict[str, Any]], args: argparse.Namespace, facts: Mapping[str, object]
) -> None:
    """Write all records there are."""
    names = dict.fromkeys(record["suite"] for record in records)
    command = f"python benchmarks/as_written.py {' '.join(names)}{' --warm' if args.warm else ''}"
    found = ratios(records)
    write(
        report_of(records, commit=args.commit, command=command, machine=facts, ratios=found),
        args.out,
    )


if __name__ == "__main__":
    main()
