"""`python -m model_center plan`: memory of a training, by the flags of `train`."""

from __future__ import annotations

import argparse
import functools
import inspect
import logging
from typing import Any

import torch
import torch.nn.functional as F

import bmtrain as bmt
from bmtrain.plan import Source, command
from model_center.commands import train
from model_center.dataset.packing import segment_mask
from model_center.errors import ConfigError
from model_center.hub.resolving import resolve
from model_center.layer.linear import Linear
from model_center.layer.quantized import BLOCK_SIZE, frozen
from model_center.model.causal import CausalModel
from model_center.model.gptj import GPTj
from model_center.optional import package
from model_center.training import adapters
from model_center.training.objectives import Objective
from model_center.training.trained_model import (
    LARGE,
    head_of,
    irreplaceable,
    layers_to_adapt,
    native_class,
)

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
    found = vars(args)
    args.batch = args.batch or args.batch_size
    args.seq = args.seq or args.max_length
    args.recompute = args.recompute or RECOMPUTE[args.use_checkpoint]
    args.dtype, args.optimizer = args.dtype or "bf16", OPTIMIZERS[args.optimizer]
    args.lora_rank = args.lora_rank or args.lora
    args.device_states = 0.0 if args.device_states == "auto" else args.device_states
    names = ("lora_rank", "lora_targets", "lora_dropout", "load_in_4bit", "objective", "vocab_size")
    given = {key: found[key] for key in names}
    raise SystemExit(command.report(args, functools.partial(source_of, name, **given)))


def source_of(
    name: str,
    *,
    lora_rank: int = 0,
    lora_targets: list[str] | None = None,
    lora_dropout: float = 0.0,
    load_in_4bit: bool = False,
    objective: Objective = Objective.NEXT_TOKEN,
    vocab_size: int | None = None,
) -> Source:
    """A model as `bmtrain.plan` takes it, with what `train` would make of it.

    All tokens of the rows are taken to be in the loss.
    """
    own = None if objective is Objective.REWARD else native_class(name)
    if own is None or own is GPTj:
        build, loss = _theirs(name, objective, vocab_size)
    else:
        changes = {"vocab_size": vocab_size} if vocab_size else {}
        build = functools.partial(own, own._CONFIG_TYPE.from_pretrained(name, **changes))
        loss = functools.partial(loss_of, objective=objective)

    def made() -> torch.nn.Module:
        model: torch.nn.Module = build()
        targets = _layers_to_adapt(model, lora_targets) if lora_rank else {}
        if load_in_4bit:
            _in_4_bits(model)
        if lora_rank:
            _adapt(model, targets, lora_rank, lora_dropout)
        return model

    def adapt(model: torch.nn.Module) -> None:
        # Beside weights in 16 bits adapters of our models have the weights' dtype.
        exact = (".scales",) if own and not load_in_4bit else (".scales", ".lora_")
        for path, param in list(model.named_parameters()):
            if any(part in path for part in exact):
                owner, _, leaf = path.rpartition(".")
                wide = torch.nn.Parameter(param.detach().float(), param.requires_grad)
                model.get_submodule(owner).register_parameter(leaf, wide)
        if objective.takes_pairs:
            for path, module in model.named_modules():
                module.training = "lora_dropout" in path

    def of_rows(model: torch.nn.Module, batch: int, seq: int) -> torch.Tensor:
        # A pair is two rows. The reference keeps nothing: it is computed before, without backward.
        before = logging.root.manager.disable
        logging.disable(logging.ERROR)  # torch's of what fails without values: the error says it
        try:
            return loss(model, batch * (2 if objective.takes_pairs else 1), seq)
        except ConfigError:
            raise
        except (TypeError, ValueError, RuntimeError, IndexError, AttributeError) as error:
            raise ConfigError(
                f"{name}: {type(model).__name__} computes sizes from values, which a plan lacks: "
                f"{type(error).__name__}: {error}"
            ) from error
        finally:
            logging.disable(before)

    return Source(name=name, build=made, loss=of_rows, adapt=adapt)


def loss_of(
    model: torch.nn.Module, batch: int, seq: int, objective: Objective = Objective.NEXT_TOKEN
) -> torch.Tensor:
    """The loss of `batch` rows of `seq` tokens, as `train` computes it of a model of ours."""
    if not isinstance(model, CausalModel):
        raise ConfigError(f"{type(model).__name__} is not a decoder.")
    ids, places = _rows(batch, seq)
    out = model(
        ids,
        attention_mask=segment_mask(torch.ones_like(ids)),
        position_ids=model.position_ids_of(places),
        output_logits=False,
    )
    hidden, targets = out.last_hidden_state.flatten(0, 1), ids.flatten()
    if objective.takes_pairs:
        return -model.log_probs(hidden, targets).sum()
    return bmt.loss.FusedCrossEntropy()(model.logits(hidden), targets)


def _theirs(name: str, objective: Objective, vocab_size: int | None) -> tuple[Any, Any]:
    """The model of transformers, and its loss as `train` computes it."""
    auto = package("transformers", "a model that is none of this package", ConfigError)
    try:
        config = auto.AutoConfig.from_pretrained(resolve(name, "config"))
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"transformers has read no configuration of {name}: {error}") from error
    is_reward, text = objective is Objective.REWARD, config.get_text_config()
    text.vocab_size = vocab_size or text.vocab_size
    if is_reward:
        config.pad_token_id, config.num_labels = config.pad_token_id or 0, 1
    kind = auto.AutoModelForSequenceClassification if is_reward else auto.AutoModelForCausalLM
    head = head_of(text)

    def loss(model: Any, batch: int, seq: int) -> torch.Tensor:
        ids, places = _rows(batch, seq)
        takes = inspect.signature(model.forward).parameters
        known = {"input_ids": ids, "position_ids": places, "use_cache": False}
        inputs = {key: value for key, value in known.items() if key in takes}
        layer, body = model.get_output_embeddings(), model.base_model
        if is_reward or not isinstance(layer, torch.nn.Linear):
            out: torch.Tensor = model(**inputs).logits.float().mean()
            return out
        if objective.takes_pairs or ids.numel() * layer.weight.shape[0] * 2 > LARGE:
            hidden = body(**inputs).last_hidden_state.flatten(0, 1).to(layer.weight.dtype)
            return head.losses(hidden, layer, ids.flatten(), "sum")
        return bmt.loss.FusedCrossEntropy()(model(**inputs).logits.flatten(0, 1), ids.flatten())

    return functools.partial(kind.from_config, config), loss


def _rows(batch: int, seq: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and positions (batch, seq) of rows that are full."""
    places = torch.arange(seq)[None].expand(batch, seq)
    return torch.zeros(batch, seq, dtype=torch.long), places


def _layers_to_adapt(model: torch.nn.Module, targets: list[str] | None) -> dict[str, Any]:
    if isinstance(model, CausalModel):
        return {"target_modules": adapters.layers_to_adapt(model, targets or adapters.ATTENTION)}
    return layers_to_adapt(model, targets)


def _adapt(model: torch.nn.Module, targets: dict[str, Any], rank: int, dropout: float) -> None:
    """Adapters as `train` makes them, all else frozen."""
    peft = package("peft", "LoRA", ConfigError)
    try:
        peft.inject_adapter_in_model(
            peft.LoraConfig(r=rank, lora_dropout=dropout, **targets), model
        )
    except ValueError as error:
        raise ConfigError(f"--lora-targets: {error}") from error


class _Product(torch.autograd.Function):
    """x W^T with a weight that is made for it, and again in backward; x is not kept."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
        ctx.shape = shape
        return F.linear(x, x.new_empty(shape))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad @ grad.new_empty(ctx.shape), None


class FourBits(Linear):
    """A frozen linear layer of which 4 bits of each element and scales are kept."""

    def __init__(self, layer: Any) -> None:
        torch.nn.Module.__init__(self)
        self.out_features, self.in_features = self.shape = tuple(layer.weight.shape)
        self.dim_out, self.dim_in, self.length_scale = *self.shape, False
        count = self.out_features * self.in_features
        self.weight = frozen(torch.empty(count // 2, 1, dtype=torch.uint8))
        self.scales = frozen(torch.empty(-(-count // BLOCK_SIZE)))
        self.bias: Any = None if layer.bias is None else frozen(layer.bias.detach())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As nn.Linear."""
        out: torch.Tensor = _Product.apply(x, self.shape)
        return out if self.bias is None else out + self.bias


def _in_4_bits(model: torch.nn.Module) -> None:
    """As `training.quantization.quantize`."""
    model.requires_grad_(False)
    heads = {"lm_head", "output_projection", "cls_projection"}
    heads |= set() if isinstance(model, CausalModel) else {*irreplaceable(model)}
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, torch.nn.Linear) and name not in heads:
                module.register_module(name, FourBits(child))
