"""One training step by each backend, on the same model."""

from __future__ import annotations

import functools
import importlib
import itertools
from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.distributed as dist
from parallel_models import ParallelGPT
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.torch_version import TorchVersion
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import bmtrain as bmt
from bmtrain.distributed.memory import DeviceMemory
from bmtrain.recompute.planner import Planners
from bmtrain.runtime import world
from models import HeadLoss, Shape, initialise, initialise_own, projected_cross_entropy
from options import Options

LEARNING_RATE, WEIGHT_DECAY, MAX_NORM = 1e-4, 0.01, 1.0
COMPILES_DEEPSPEED = "2.13"  # the loss is right there (DeepSpeed 0.19.8), and wrong in 2.11
# What others keep where they recompute selectively: outputs of products and of attention.
KEPT = (
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
)


class Backend(ABC):
    """Builds the model and trains it by whole steps: forward, backward, clip to norm 1, AdamW."""

    @abstractmethod
    def __init__(self, options: Options) -> None: ...

    @abstractmethod
    def step(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """One step on this rank's batch, token ids and targets, both (batch, seq); the loss."""

    def account(self) -> dict[str, Any]:
        """What else a record says of the last step."""
        return {}


class Ours(Backend):
    """This library: bf16 weights in shards, fp32 masters in the optimizer; with --tp the layers are
    split over ranks too, with --pipe over stages.
    """

    def __init__(self, options: Options) -> None:
        model = _plain_model(options)
        recompute: bool | str = (
            options.recompute if options.recompute == "auto" else options.recompute == "all"
        )
        kind = bmt.TransformerBlockList if options.pipe == 1 else bmt.PipelineTransformerBlockList
        model.blocks = kind(
            bmt.Block(
                block, use_checkpoint=recompute, zero_level=options.zero_level, fp8=options.fp8
            )
            for block in model.blocks
        )
        model.head = bmt.Block(model.head, use_checkpoint=False, zero_level=2)
        self.model = bmt.BMTrainModelWrapper(model)
        bmt.init_parameters(self.model)
        initialise(self.model)
        settings: dict[str, Any] = {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY}
        settings |= {"moments": options.moments, "master_weights": options.master_weights}
        if options.offload:
            room = options.device_states
            settings |= {
                "overlap": options.overlap,
                "device_bytes": room if isinstance(room, str) else int(room * 2**30),
            }
        adam = bmt.optim.AdamOffloadOptimizer if options.offload else bmt.optim.AdamOptimizer
        self.optimizer = adam(self.model.parameters(), **settings)
        self.manager = bmt.optim.OptimManager()
        self.manager.add_optimizer(self.optimizer)
        self._num_micro = options.micro_batches

    def _forward_backward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(ids, targets)
        self.manager.backward(loss / self._num_micro)
        return loss.detach()

    def step(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        parts = zip(ids.chunk(self._num_micro), targets.chunk(self._num_micro), strict=True)
        loss = torch.stack([self._forward_backward(*part) for part in parts]).mean()
        self.manager.clip_grad_norm(self.optimizer.param_groups, max_norm=MAX_NORM)
        self.manager.step()
        self.manager.zero_grad()
        return loss

    def account(self) -> dict[str, Any]:
        """levels: what blocks recompute by the plan, in the order of forward. mapped_gib: shards
        that ranks map into each other, beside torch's allocator.
        """
        run = world.current()
        levels = run.service(Planners).of(run.mesh.world).levels
        found: dict[str, Any] = {}
        if levels:
            runs = [
                (level.name.lower(), len(list(own))) for level, own in itertools.groupby(levels)
            ]
            found["levels"] = [f"{count} {name}" for name, count in runs]
        if run.device.type != "cpu":
            mapped = run.service(DeviceMemory).held() - torch.cuda.memory_allocated()
            found["mapped_gib"] = round(mapped / 2**30, 1)
        return found


def _plain_model(options: Options) -> Any:
    """The model before it is sharded: in bf16, without memory."""
    shape = options.geometry
    with torch.device("meta"):
        if options.tp == options.pipe == 1:
            return shape.model(fused_loss() if options.fused_head else projected_cross_entropy).to(
                torch.bfloat16
            )
        if not isinstance(shape, Shape):
            raise SystemExit(
                f"--tp {options.tp} --pipe {options.pipe}: {options.shape} cannot be split over "
                "ranks or stages; choose a GPT or leave them out."
            )
        return ParallelGPT(shape, torch.bfloat16)


def fused_loss() -> HeadLoss:
    """The same loss without ever holding the logits of all rows."""
    fused = bmt.loss.FusedLinearCrossEntropy()
    return lambda hidden, project, targets: fused(hidden, project.weight, targets)


class FSDP2(Backend):
    """torch's fully_shard: fp32 shards, bf16 compute and reduction, fused AdamW; each block and the
    head a unit and a graph.

    The head stays gathered until its backward pass, which comes next, and so does the root, which
    is left with the embeddings: torch's default. Prefetching is torch's default too.
    """

    def __init__(self, options: Options) -> None:
        # Inputs of blocks stay as they are: the hidden states are bf16 anyway, rotary angles are
        # meant to be fp32.
        precision = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, cast_forward_inputs=False
        )
        offload = CPUOffloadPolicy() if options.offload else OffloadPolicy()
        shard = functools.partial(fully_shard, mp_policy=precision, offload_policy=offload)
        with torch.device("meta"):
            model: Any = options.geometry.model()
        _recompute(model, options.recompute)
        for unit in (*model.blocks, model.head):
            if options.compile:
                unit.compile(dynamic=False, fullgraph=True)
        for block in model.blocks:
            shard(block)
        shard(model.head, reshard_after_forward=False)
        shard(model)
        model.to_empty(device="cpu" if options.offload else options.device)
        initialise(model)
        self.model = model
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True
        )

    def step(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(ids, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def _recompute(model: Any, what: str) -> None:
    """Blocks keep their inputs only ("all"), or what KEPT names too ("selective"), and compute the
    rest again in backward.
    """
    if what == "none":
        return
    keep: dict[str, Any] = {}
    if what == "selective":
        keep["context_fn"] = functools.partial(create_selective_checkpoint_contexts, list(KEPT))
    for index, block in enumerate(model.blocks):  # there is nothing random in them
        model.blocks[index] = checkpoint_wrapper(block, preserve_rng_state=False, **keep)


class Plain(Backend):
    """A good single-file trainer: fp32 weights, bf16 autocast, whole-model compile, fused AdamW;
    DDP on several GPUs.

    Gradients travel between GPUs in bf16. CUDA graphs are those of torch.compile, mode
    "reduce-overhead".
    """

    def __init__(self, options: Options) -> None:
        torch.set_float32_matmul_precision("high")
        self.device = options.device
        with torch.device(options.device):
            model: Any = options.geometry.model()
        _recompute(model, options.recompute)
        initialise(model)
        self.params = list(model.parameters())
        if dist.get_world_size() > 1:
            model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
            if options.device != "cpu":  # torch has it for NCCL only
                model.register_comm_hook(None, bf16_compress_hook)
        mode = "reduce-overhead" if options.cuda_graph else None
        self.model = torch.compile(model, mode=mode) if options.compile else model
        self.optimizer = torch.optim.AdamW(
            self.params, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True
        )

    def step(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        # what graphs have left behind in the last step may go
        torch.compiler.cudagraph_mark_step_begin()
        with torch.autocast(self.device, dtype=torch.bfloat16):
            loss: torch.Tensor = self.model(ids, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(self.params, MAX_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach().clone()  # else the next replay writes to it


class DeepSpeed(Backend):
    """DeepSpeed's ZeRO-3 in bf16 with torch's fused AdamW, or its own CPU Adam: `pip install
    deepspeed`.

    Compiled, blocks and the head are its "leaf modules", gathered as a whole: else its hooks, which
    run on every layer, cut the graphs to pieces. With torch 2.11 the loss then falls too slowly,
    with its own `engine.compile()` too: it is refused there.
    """

    def __init__(self, options: Options) -> None:
        if options.compile and TorchVersion(torch.__version__) < COMPILES_DEEPSPEED:
            raise RuntimeError(
                f"DeepSpeed compiles from torch {COMPILES_DEEPSPEED} on, this is "
                f"{torch.__version__}: use --no-compile."
            )
        deepspeed = importlib.import_module("deepspeed")  # no dependency of this project
        deepspeed.init_distributed()  # on the process group that there is
        config = deepspeed_config(options)
        with deepspeed.zero.Init(config_dict_or_path=config, dtype=torch.bfloat16):
            model: Any = options.geometry.model()
        for module in model.modules():
            own = list(module.parameters(recurse=False))
            if own:
                with deepspeed.zero.GatheredParameters(own, modifier_rank=0):
                    initialise_own(module)  # what rank 0 writes counts
        if options.compile:
            units = [*model.blocks, model.head]
            deepspeed.utils.set_z3_leaf_modules(model, list({type(unit) for unit in units}))
            for unit in units:  # `forward` alone: its hooks stay outside
                unit.forward = torch.compile(unit.forward, dynamic=False, fullgraph=True)
        _recompute(model, options.recompute)
        self.engine, *_ = deepspeed.initialize(
            model=model, config=config, model_parameters=model.parameters()
        )

    def step(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.engine(ids, targets)
        self.engine.backward(loss)
        self.engine.step()
        return loss.detach()


def deepspeed_config(options: Options) -> dict[str, Any]:
    """Its configuration: the values its documentation gives for ZeRO-3, with buckets for models of
    some 1e10 parameters.
    """
    zero: dict[str, Any] = {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": 500_000_000,
        "stage3_prefetch_bucket_size": 500_000_000,
        "stage3_param_persistence_threshold": 100_000,
        "stage3_max_live_parameters": 3_000_000_000,
        "stage3_max_reuse_distance": 3_000_000_000,
    }
    if options.offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    # torch's fused AdamW on its flat shards: its own fused Adam does the same and has to be
    # compiled first, as its CPU Adam has.
    kernel = {} if options.offload else {"torch_adam": True, "fused": True}
    return {
        "train_micro_batch_size_per_gpu": options.batch[0],  # of its own statistics only
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": True},
        "gradient_clipping": MAX_NORM,
        "zero_optimization": zero,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY, **kernel},
        },
    }


BACKENDS: dict[str, type[Backend]] = {
    "bmtrain": Ours,
    "fsdp2": FSDP2,
    "plain": Plain,
    "deepspeed": DeepSpeed,
}


def init_arguments(options: Options) -> dict[str, Any]:
    """What `bmt.init_distributed` gets: all backends start alike, and what concerns this library's
    engine matters to it alone.
    """
    if options.backend != "bmtrain":
        return {}
    transport = "collective" if options.transport == "nccl" else options.transport
    limit = None if options.memory_limit is None else round(options.memory_limit * 2**30)
    return {
        "tp_size": options.tp,
        "pipe_size": options.pipe,
        "num_micro_batches": 2 * options.pipe if options.pipe > 1 else None,
        "transport": transport,
        "compile": options.compile,
        "memory_limit": limit,
    }
