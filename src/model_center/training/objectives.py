"""What a run minimises: the next token's cross-entropy, or a loss of preferences.

Sources: Rafailov et al., "Direct Preference Optimization" (2023); Hong et al., "ORPO: Monolithic
Preference Optimization without Reference Model" (2024); Meng et al., "SimPO: Simple Preference
Optimization with a Reference-Free Reward" (2024); for rewards Bradley and Terry (1952), as Ouyang
et al., "Training language models to follow instructions with human feedback" (2022).
"""

from __future__ import annotations

import abc
import argparse
import contextlib
import enum
import hashlib
import math
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

import bmtrain as bmt
from bmtrain.checkpoint.entries import Entry
from bmtrain.checkpoint.saving import visit
from bmtrain.distributed.agreement import attempt, everyone
from model_center.dataset.loader import DistributedDataLoader
from model_center.dataset.preferences import PreferencePairs
from model_center.errors import ConfigError, DataError
from model_center.optional import package
from model_center.training.base_weights import checksum
from model_center.training.trained_model import Batch, RewardModel, TrainedModel

HALF = -math.log(2.0)
Sample = tuple[torch.Tensor, torch.Tensor]  # ids and targets, int64 (length,)


class Objective(enum.Enum):
    """What `--objective` may be."""

    NEXT_TOKEN = "next-token"
    DPO = "dpo"
    ORPO = "orpo"
    SIMPO = "simpo"
    REWARD = "reward"

    @property
    def takes_pairs(self) -> bool:
        """Whether rows are pairs of a better and a worse answer."""
        return self is not Objective.NEXT_TOKEN

    @property
    def beta(self) -> float:
        """The default of `--beta`: that of the papers."""
        return 2.0 if self is Objective.SIMPO else 0.1


def dpo(better: torch.Tensor, worse: torch.Tensor, beta: float) -> torch.Tensor:
    """DPO's loss (pairs,) of log-probability ratios (pairs,) of policy and reference."""
    return -F.logsigmoid(beta * (better - worse))


def orpo(better: torch.Tensor, worse: torch.Tensor, beta: float) -> torch.Tensor:
    """ORPO's loss (pairs,) of mean log-probabilities per token (pairs,); `beta` is its lambda."""
    odds = better - worse - (log1mexp(better) - log1mexp(worse))
    return -better - beta * F.logsigmoid(odds)


def simpo(better: torch.Tensor, worse: torch.Tensor, beta: float, margin: float) -> torch.Tensor:
    """SimPO's loss (pairs,) of mean log-probabilities per token (pairs,); `margin` is its gamma."""
    return -F.logsigmoid(beta * (better - worse) - margin)


def log1mexp(x: torch.Tensor) -> torch.Tensor:
    """log(1 - exp(x)) of x below 0, exact at both ends."""
    is_small = x > HALF  # the branch that is not taken must not make NaN of its gradient
    near, far = torch.where(is_small, x, HALF), torch.where(is_small, HALF, x)
    return torch.where(is_small, torch.log(-torch.expm1(near)), torch.log1p(-torch.exp(far)))


class Goal(abc.ABC):
    """The loss of batches.

    Args:
        trained_model: what learns.
        args: the flags.
    """

    def __init__(self, trained_model: TrainedModel, args: argparse.Namespace) -> None:
        self.trained_model, self.args = trained_model, args

    def begin(self) -> None:
        """Put the model into the state in which it learns."""
        self.trained_model.model.train()

    @abc.abstractmethod
    def counted(self, batch: Batch) -> torch.Tensor:
        """What the mean of the loss is over: integers of any shape, -100 where nothing counts."""

    @abc.abstractmethod
    def loss_sum(self, batch: Batch) -> torch.Tensor:
        """The loss, summed over what counts."""

    def losses(self, batches: Sequence[Batch]) -> Iterator[torch.Tensor]:
        """The share of each micro-batch in the mean loss of a step. Collective."""
        mean = bmt.loss.TokenMean(self.counted(batch) for batch in batches)
        return (mean(self.loss_sum(batch)) for batch in batches)

    @abc.abstractmethod
    def loss_alone(self, samples: Sequence[Sample], reference: torch.Tensor | None) -> torch.Tensor:
        """The loss of one sample, or of the two of a pair, each computed by itself. Collective.

        Args:
            samples: ids and targets of each.
            reference: what the batch says of the pair, float32 (2,).
        """

    @abc.abstractmethod
    def sums(self, batch: Batch) -> torch.Tensor:
        """float64: what is measured of a batch, summed over what counts; the loss is the first."""

    @abc.abstractmethod
    def record(self, means: list[float]) -> dict[str, float]:
        """What is written of these means."""


class NextToken(Goal):
    """Cross-entropy, over all tokens in the loss."""

    def counted(self, batch: Batch) -> torch.Tensor:
        """As in Goal."""
        return batch["targets"]

    def loss_sum(self, batch: Batch) -> torch.Tensor:
        """As in Goal."""
        return self.trained_model.loss_sum(batch)

    def loss_alone(self, samples: Sequence[Sample], reference: torch.Tensor | None) -> torch.Tensor:
        """As in Goal."""
        ((ids, targets),) = samples
        logits = self.trained_model.logits(ids[None])[0].float()
        return F.cross_entropy(logits, targets, reduction="sum")

    def sums(self, batch: Batch) -> torch.Tensor:
        """As in Goal."""
        return self.loss_sum(batch)[None].double()

    def record(self, means: list[float]) -> dict[str, float]:
        """As in Goal."""
        return {"validation_loss": means[0], "perplexity": math.exp(min(means[0], 700.0))}


class Preference(Goal):
    """A loss of pairs, the mean over all pairs of a step.

    As in the papers' programs, policy and reference compute without dropout, but for that of
    adapters. The reference of DPO is the model as it begins: under adapters they are left out for
    it, else its log-probabilities are in the batches (`add_reference`).
    """

    def __init__(self, trained_model: TrainedModel, args: argparse.Namespace) -> None:
        super().__init__(trained_model, args)
        self._kind: Objective = args.objective
        self._beta = self._kind.beta if args.beta is None else args.beta
        self._adapters = _adapters(trained_model.model) if args.lora_rank else []

    def begin(self) -> None:
        """As in Goal."""
        self.trained_model.model.eval()
        for module in self._adapters:
            module.lora_dropout.train()

    def counted(self, batch: Batch) -> torch.Tensor:
        """As in Goal."""
        return batch["number"]

    def loss_sum(self, batch: Batch) -> torch.Tensor:
        """As in Goal."""
        return self._losses(batch)[0].sum()

    def sums(self, batch: Batch) -> torch.Tensor:
        """As in Goal."""
        losses, better, worse = self._losses(batch)
        return torch.stack([losses.sum(), (better > worse).sum(), (better - worse).sum()]).double()

    def record(self, means: list[float]) -> dict[str, float]:
        """As in Goal."""
        return dict(zip(("validation_loss", "accuracy", "reward_margin"), means, strict=True))

    def _losses(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of pairs: losses, and rewards of both answers."""
        lengths = (batch["targets"] != -100).sum(1)
        if isinstance(self.trained_model, RewardModel):
            return self._of_scores(self.trained_model.rewards(batch), lengths, None)
        # The reference first: its pass must not come between the policy's two.
        reference = self._reference(batch) if self._kind is Objective.DPO else None
        return self._of_scores(self._sums(batch), lengths, reference)

    def _of_scores(
        self, scores: torch.Tensor, lengths: torch.Tensor, reference: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The same of rewards or log-probabilities (rows,) of answers so long."""
        if self._kind is Objective.REWARD:
            better, worse = scores.chunk(2)
            return -F.logsigmoid(better - worse), better, worse
        if reference is not None:
            better, worse = (scores - reference).chunk(2)
            return dpo(better, worse, self._beta), self._beta * better, self._beta * worse
        better, worse = (scores / lengths).chunk(2)
        if self._kind is Objective.ORPO:
            losses = orpo(better, worse, self._beta)
        else:
            losses = simpo(better, worse, self._beta, self.args.margin)
        return losses, self._beta * better, self._beta * worse

    def loss_alone(self, samples: Sequence[Sample], reference: torch.Tensor | None) -> torch.Tensor:
        """As in Goal."""
        if self._kind is not Objective.DPO:
            reference = None
        elif self.args.lora_rank:
            with torch.no_grad(), self._without_adapters():
                reference = torch.stack([self._score_alone(*one) for one in samples])
        scores = torch.stack([self._score_alone(*one) for one in samples])
        lengths = torch.stack([(targets != -100).sum() for _, targets in samples])
        return self._of_scores(scores, lengths, reference)[0].sum()

    def _score_alone(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = self.trained_model.logits(ids[None])[0].float()
        if self._kind is Objective.REWARD:
            return logits[0]
        return -F.cross_entropy(logits, targets, reduction="sum")

    def _sums(self, batch: Batch) -> torch.Tensor:
        """Log-probabilities of the answers of rows, (rows,)."""
        found = self.trained_model.log_probs(batch)
        # not index_add, which adds in another order each time on GPUs
        of_tokens = found.new_zeros(batch["targets"].shape)
        return of_tokens.masked_scatter(batch["targets"] != -100, found).sum(1)

    @torch.no_grad()
    def _reference(self, batch: Batch) -> torch.Tensor:
        if not self.args.lora_rank:
            return batch["reference"].t().flatten()
        with self._without_adapters():
            return self._sums(batch)

    @contextlib.contextmanager
    def _without_adapters(self) -> Iterator[None]:
        """Adapters count nothing; they are not switched off, which would freeze them."""
        before = [(dict(one.scaling), one.lora_dropout.training) for one in self._adapters]
        try:
            for module in self._adapters:
                module.scaling.update(dict.fromkeys(module.scaling, 0.0))
                module.lora_dropout.eval()
            yield
        finally:
            for module, (scaling, is_training) in zip(self._adapters, before, strict=True):
                module.scaling.update(scaling)
                module.lora_dropout.train(is_training)

    @torch.no_grad()
    def add_reference(self, pairs: PreferencePairs, name: str) -> None:
        """Put the log-probabilities of the model as it is into pairs. Collective.

        They are kept in `--cache` or with the tokens in `--save`, by data, model and dtype.

        Args:
            pairs: of which they are.
            name: says which data they are.
        """
        if self._kind is not Objective.DPO or self.args.lora_rank:
            return
        folder = self.args.cache or (self.args.save and pathlib.Path(self.args.save, "tokens"))
        file = None
        if folder:
            facts = [name, self.args.dtype, str(len(pairs)), *_weights(self.trained_model.model)]
            key = hashlib.sha256("\0".join(facts).encode()).hexdigest()[:24]
            file = pathlib.Path(folder, f"reference-{key}.npy")
        known = attempt(lambda: _read(file, len(pairs)), everyone(), DataError)
        is_known = torch.tensor(float(known is not None), device=bmt.device())
        if bmt.sum_loss(is_known) == 1 and known is not None:  # on all hosts
            pairs.reference = known
            return
        found = torch.zeros(len(pairs), 2, device=bmt.device())
        self.trained_model.model.eval()
        for batch in DistributedDataLoader(pairs, batch_size=self.args.batch_size):
            found[batch["number"]] = self._sums(batch).view(2, -1).t()
        pairs.reference = bmt.distributed.all_reduce(found, "sum").cpu()
        if file is not None:
            attempt(lambda: _write(file, pairs.reference), everyone(), DataError)


def goal_of(trained_model: TrainedModel, args: argparse.Namespace) -> Goal:
    """The goal that the flags name.

    Raises:
        ConfigError: for flags that do not go with it.
    """
    kind: Objective = args.objective
    if args.samples and kind is Objective.REWARD:
        raise ConfigError("--samples: a reward model answers nothing.")
    return (Preference if kind.takes_pairs else NextToken)(trained_model, args)


def _adapters(model: torch.nn.Module) -> list[Any]:
    layers = package("peft.tuners.tuners_utils", "LoRA", ConfigError, name="peft")
    return [one for one in model.modules() if isinstance(one, layers.BaseTunerLayer)]


def _weights(model: torch.nn.Module) -> list[str]:
    """A checksum of each tensor of the model, in order. Collective."""
    made: dict[str, int] = {}

    def take(entry: Entry, tensor: torch.Tensor) -> None:
        made[entry.name] = checksum(tensor)

    visit(model, take)
    return [f"{name} {value}" for name, value in sorted(made.items())]


def _read(file: pathlib.Path | None, count: int) -> torch.Tensor | None:
    if file is None or not file.is_file():
        return None
    found = torch.from_numpy(np.load(file))
    return found if found.shape == (count, 2) else None


def _write(file: pathlib.Path, values: torch.Tensor) -> None:
    if bmt.rank() != 0:
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.with_suffix(".part").open("wb") as out:
        np.save(out, values.numpy())
    file.with_suffix(".part").rename(file)
