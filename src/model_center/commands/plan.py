"""`python -m model_center plan`: memory of a training, by the flags of `train`."""

from __future__ import annotations

import argparse
import functools
import sys
from typing import Any

import torch
import torch.nn.functional as F

import bmtrain as bmt
from bmtrain.plan import Source, command
from bmtrain.plan.sources import loss_of as loss_of_theirs
from bmtrain.plan.sources import of_transformers
from model_center.commands import train
from model_center.errors import ConfigError
from model_center.layer.linear import Linear
from model_center.layer.quantized import BLOCK_SIZE
from model_center.model.causal import CausalModel
from model_center.optional import package
from model_center.training.adapters import ALL, ATTENTION, layers_to_adapt
from model_center.training.objectives import Objective
from model_center.training.trained_model import TRANSFORMERS_ATTENTION, native_class

RECOMPUTE = {True: "block", False: "nothing", "auto": "auto"}
OPTIMIZERS = {"adam": "adam", "adam-offload": "offload", "offload": "offload", "torch": "torch"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `run`: those of `train`, and those of a machine."""
    parser.description = (
        "Forecast the memory of a training on GPUs, without its weights: the command line of train "
        "with plan in its place, and --gpu. Memory of a CPU is not forecast."
    )
    parser.epilog = command.EPILOG
    parser.conflict_handler = "resolve"  # of a flag that both have, train's counts
    parser.add_argument("model", nargs="?", metavar="MODEL", help="another way of --model-config")
    parser.add_argument("--lora", type=int, help="another way of --lora-rank")
    command.add_run_arguments(parser)
    train.add_arguments(parser)
    for action in parser._actions:  # noqa: SLF001 (argparse lists them nowhere else)
        if action.dest == "optimizer":
            action.choices = list(OPTIMIZERS)
    parser.set_defaults(batch=None, seq=None, recompute=None)


def run(args: argparse.Namespace) -> None:
    """Print the forecast; the exit status says whether it fits.

    Raises:
        ConfigError, IdentifierError: for a model that is not known, or is no decoder.
    """
    name = args.model or args.model_config
    if name is None:
        raise ConfigError("plan needs a model: --model-config MODEL.")
    print(f"plan of {name}: a step without memory ...", file=sys.stderr, flush=True)
    found = vars(args)
    args.batch = args.batch or args.batch_size
    args.seq = args.seq or args.max_length
    args.recompute = args.recompute or RECOMPUTE[args.use_checkpoint]
    args.dtype, args.optimizer = args.dtype or "bf16", OPTIMIZERS[args.optimizer]
    args.lora_rank = args.lora_rank or args.lora
    args.device_states = 0.0 if args.device_states == "auto" else args.device_states
    given = {key: found[key] for key in ("lora_rank", "lora_targets", "load_in_4bit", "objective")}
    raise SystemExit(command.report(args, functools.partial(source_of, name, **given)))


def source_of(
    name: str,
    *,
    lora_rank: int = 0,
    lora_targets: list[str] | None = None,
    load_in_4bit: bool = False,
    objective: Objective = Objective.NEXT_TOKEN,
) -> Source:
    """A model as `bmtrain.plan` takes it, with what `train` would make of it."""
    own = native_class(name)
    if own is None:
        theirs = of_transformers(name)
        build, loss, targets = theirs.build, loss_of_theirs, [*TRANSFORMERS_ATTENTION]
    else:
        build = functools.partial(own, own._CONFIG_TYPE.from_pretrained(name))
        loss, targets = loss_of, [*ATTENTION]

    def made() -> torch.nn.Module:
        model = build()
        if load_in_4bit:
            _in_4_bits(model)
        if lora_rank:
            _adapt(model, lora_rank, lora_targets or targets)
        return model

    def of_rows(model: torch.nn.Module, batch: int, seq: int) -> torch.Tensor:
        # A pair is two rows. The reference keeps nothing: it is computed before, without backward.
        return loss(model, batch * (2 if objective.takes_pairs else 1), seq)

    return Source(name=name, build=made, loss=of_rows)


def loss_of(model: torch.nn.Module, batch: int, seq: int) -> torch.Tensor:
    """The mean cross-entropy of `batch` rows of `seq` tokens, as `train` computes it."""
    if not isinstance(model, CausalModel):
        raise ConfigError(f"{type(model).__name__} is not a decoder.")
    ids = torch.zeros(batch, seq, dtype=torch.long)
    out = model(ids, output_logits=False)
    logits = model.logits(out.last_hidden_state.flatten(0, 1))
    return bmt.loss.FusedCrossEntropy()(logits, ids.flatten())


def _adapt(model: torch.nn.Module, rank: int, targets: list[str]) -> None:
    """Adapters as `train` makes them, all else frozen."""
    peft = package("peft", "LoRA", ConfigError)
    if isinstance(model, CausalModel):
        chosen: Any = layers_to_adapt(model, targets)
    else:
        names = {name.rpartition(".")[2] for name, _ in model.named_modules()}
        chosen = [name for name in targets if name in names]
        chosen = "all-linear" if targets == [ALL] or not chosen else chosen
    peft.inject_adapter_in_model(peft.LoraConfig(r=rank, target_modules=chosen), model)


class FourBits(Linear):
    """A frozen linear layer of which 4 bits of each element and scales lie in memory."""

    def __init__(self, layer: Any) -> None:
        torch.nn.Module.__init__(self)
        self.out_features, self.in_features = self.shape = tuple(layer.weight.shape)
        self.dim_out, self.dim_in, self.length_scale = *self.shape, False
        count = self.out_features * self.in_features
        frozen = functools.partial(torch.nn.Parameter, requires_grad=False)
        self.weight = frozen(torch.empty(count // 2, 1, dtype=torch.uint8))
        # as whole numbers of the same size: a plan casts all others
        self.scales = frozen(torch.empty(-(-count // BLOCK_SIZE), dtype=torch.int32))
        self.bias: Any = None if layer.bias is None else frozen(layer.bias.detach())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As nn.Linear, with a weight that is made for the product, and again in backward."""
        return F.linear(x, x.new_empty(self.shape), self.bias)


def _in_4_bits(model: torch.nn.Module) -> None:
    """As `training.quantization.quantize`."""
    model.requires_grad_(False)
    heads = {"lm_head", "output_projection", "cls_projection"}
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, torch.nn.Linear) and name not in heads:
                module.register_module(name, FourBits(child))
