"""One training step by each backend, on the same model."""

from __future__ import annotations

import argparse
from abc import ABC, abstractmethod

import torch
import torch.distributed as dist
from parallel_models import ParallelGPT
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

import bmtrain as bmt
from models import GPT, Shape, initialise


class Backend(ABC):
    """Builds the model and trains it by whole steps: forward, backward, clip to norm 1, AdamW."""

    @abstractmethod
    def __init__(self, shape: Shape, args: argparse.Namespace) -> None: ...

    @abstractmethod
    def step(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """One step on this rank's batch; the loss."""


class Ours(Backend):
    """This library: bf16 weights in shards, fp32 masters in the optimizer; with --tp the layers are split over ranks too."""

    def __init__(self, shape: Shape, args: argparse.Namespace) -> None:
        with torch.device("meta"):
            model = GPT(shape).to(torch.bfloat16) if args.tp == 1 else ParallelGPT(shape, torch.bfloat16)
        blocks = [bmt.Block(block, use_checkpoint=args.recompute, zero_level=args.zero_level) for block in model.blocks]
        model.blocks = bmt.TransformerBlockList(blocks)  # type: ignore[assignment]
        model.head = bmt.Block(model.head, use_checkpoint=False, zero_level=2)  # type: ignore[assignment]
        self.model = bmt.BMTrainModelWrapper(model)
        bmt.init_parameters(self.model)
        if args.compile:
            for block in [*blocks, self.model.head]:
                block.compile(dynamic=False)
        kind = bmt.optim.AdamOffloadOptimizer if args.offload else bmt.optim.AdamOptimizer
        self.optimizer = kind(self.model.parameters(), lr=1e-4, weight_decay=0.01)
        self.manager = bmt.optim.OptimManager()
        self.manager.add_optimizer(self.optimizer)

    def step(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = self.model(ids, targets)
        self.manager.zero_grad()
        self.manager.backward(loss)
        self.manager.clip_grad_norm(self.optimizer.param_groups, max_norm=1.0)
        self.manager.step()
        return loss.detach()


class FSDP2(Backend):
    """torch's fully_shard with mixed precision: fp32 shards, bf16 compute and reduction, fused AdamW."""

    def __init__(self, shape: Shape, args: argparse.Namespace) -> None:
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        offload = CPUOffloadPolicy() if args.offload else OffloadPolicy()
        with torch.device("meta"):
            model = GPT(shape)
        for index, block in enumerate(model.blocks):
            part = checkpoint_wrapper(block) if args.recompute else block
            model.blocks[index] = part
            if args.compile:
                part.compile(dynamic=False)
            fully_shard(part, mp_policy=precision, offload_policy=offload)
        fully_shard(model, mp_policy=precision, offload_policy=offload)
        model.to_empty(device="cpu" if args.offload else "cuda")
        initialise(model)
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)

    def step(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(ids, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


class Plain(Backend):
    """A good single-file trainer: fp32 weights, bf16 autocast, whole-model compile, fused AdamW; DDP on several GPUs."""

    def __init__(self, shape: Shape, args: argparse.Namespace) -> None:
        torch.set_float32_matmul_precision("high")
        with torch.device("cuda"):
            model = GPT(shape)
        initialise(model)
        self.params = list(model.parameters())
        wrapped = nn.parallel.DistributedDataParallel(model) if dist.get_world_size() > 1 else model
        self.model = torch.compile(wrapped) if args.compile else wrapped
        self.optimizer = torch.optim.AdamW(self.params, lr=1e-4, weight_decay=0.01, fused=True)

    def step(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss: torch.Tensor = self.model(ids, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(self.params, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


BACKENDS: dict[str, type[Backend]] = {"bmtrain": Ours, "fsdp2": FSDP2, "plain": Plain}
