"""Programs to verify: correct ones, and ones with a fault of each kind."""

import random
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import bmtrain as bmt
from bmtrain.errors import ConfigurationError
from bmtrain.verification import Program

VOCAB = 29


class Layer(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(12), nn.Linear(12, 12)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.dropout(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Some residual layers, a tied head, and a buffer that counts."""

    count: torch.Tensor

    def __init__(self, dropout=0.0):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 12)
        self.layers = nn.ModuleList([Layer(dropout) for _ in range(3)])
        self.head = nn.Linear(12, VOCAB)
        self.head.weight = self.embedding.weight
        self.register_buffer("count", torch.zeros(()))

    def forward(self, tokens):
        self.count += 1
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def tokens(number):
    return torch.randint(0, VOCAB, (12, 5), generator=torch.Generator().manual_seed(number))


def cross_entropy(model, batch):
    return F.cross_entropy(model(batch["tokens"]).float().flatten(0, 1), batch["targets"].flatten())


BATCHES = [{"tokens": tokens(number), "targets": tokens(number + 10)} for number in range(2)]


def correct():
    return bmt.verify.Program(model=Net, batches=BATCHES, loss=cross_entropy, clip=0.5)


def in_bfloat16():
    return Program(
        model=lambda: Net().bfloat16(),
        batches=BATCHES,
        loss=cross_entropy,
        optimizer=bmt.optim.AdamOptimizer,
    )


def accumulate(trainer, model, batch):
    """Two micro-batches, the first of which waits."""
    trainer.zero_grad()
    loss = cross_entropy(model, batch) / 2
    trainer.backward(loss, reduce_gradients=False)
    loss = cross_entropy(model, batch) / 2
    trainer.backward(loss)
    trainer.clip_grad_norm(0.3)
    trainer.step()
    return loss


def with_a_step():
    return Program(
        model=Net,
        batches=BATCHES,
        step=accumulate,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    )


class Normalized(nn.Module):
    """The gradient of the bias before a BatchNorm is rounding, of which Adam makes whole steps."""

    def __init__(self):
        super().__init__()
        self.embedding, self.inner, self.norm = (
            nn.Embedding(VOCAB, 24),
            nn.Linear(24, 24),
            nn.BatchNorm1d(24),
        )
        self.head = nn.Linear(24, VOCAB)

    def forward(self, tokens):
        x = self.inner(self.embedding(tokens))
        return self.head(self.norm(x.flatten(0, 1)).view_as(x))


def with_batch_norm():
    return Program(
        model=Normalized,
        batches=BATCHES,
        loss=cross_entropy,
        batch="same",
        optimizer=bmt.optim.AdamOptimizer,
    )


def with_dropout():
    return Program(model=lambda: Net(0.3), batches=BATCHES, loss=cross_entropy, batch="same")


def _example():
    folder = str(Path(__file__).parents[2] / "examples" / "gpt2")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    from models import GPT

    model = GPT(2, VOCAB, 16, 4, 4, 32, 8)
    bmt.init_parameters(model)
    return model


def _example_loss(model, batch):
    positions = torch.arange(5, device=batch["tokens"].device).expand_as(batch["tokens"])
    return bmt.loss.FusedCrossEntropy(parallel=True)(
        model(batch["tokens"], positions).flatten(0, 1), batch["targets"].flatten()
    )


def gpt2_example():
    return Program(
        model=_example,
        batches=BATCHES,
        loss=_example_loss,
        optimizer=bmt.optim.AdamOptimizer,
        clip=1.0,
    )


SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "dim_model": 24,
    "num_heads": 4,
    "dim_head": 6,
    "dim_ff": 27,
    "num_layers": 2,
    "half": False,
}


def _with_values(model):
    """In one process model_center's models have values at once, on ranks when they are asked to."""
    if bmt.is_initialized():
        bmt.init_parameters(model)
    return model


def _on_the_gpu(model):
    """Ranks draw the values of model_center's models on their GPUs."""
    with torch.device("cuda"):
        return _with_values(model())


def _of_logits(model, batch):
    return F.cross_entropy(model(batch["tokens"]).logits.flatten(0, 1), batch["targets"].flatten())


def llama():
    # here: the other programs are quick to import
    from model_center.model.llama import Llama, LlamaConfig

    return Program(
        model=lambda: _with_values(Llama(LlamaConfig(**SIZES, num_heads_kv=2))),
        batches=BATCHES,
        loss=_of_logits,
    )


def llama_on_a_gpu():
    from model_center.model.llama import Llama, LlamaConfig

    config = LlamaConfig(**SIZES, num_heads_kv=2)
    return Program(
        model=lambda: _on_the_gpu(lambda: Llama(config)), batches=BATCHES, loss=_of_logits
    )


def bert():
    from model_center.model.bert import Bert, BertConfig

    config = BertConfig(**SIZES, position_size=9, dropout_p=0.0)
    return Program(
        model=lambda: _with_values(Bert(config)),
        batches=BATCHES,
        loss=_of_logits,
        optimizer=bmt.optim.AdamOptimizer,
    )


def without_values():
    from model_center.model.llama import Llama, LlamaConfig

    return Program(model=lambda: Llama(LlamaConfig(**SIZES)), batches=BATCHES, loss=_of_logits)


# Faults.


class ByRank(Net):
    def forward(self, tokens):
        return super().forward(tokens) * (1 + 1e-3 * bmt.rank())


def rank_in_arithmetic():
    return Program(model=ByRank, batches=BATCHES, loss=cross_entropy)


def _scaled(trainer, model, batch):
    trainer.zero_grad()
    loss = cross_entropy(model, batch)
    trainer.backward(loss * bmt.world_size())
    trainer.step()
    return loss


def gradient_scaled():
    return Program(model=Net, batches=BATCHES, step=_scaled)


class OwnCount(Net):
    def forward(self, tokens):
        if self.training and bmt.world_size() > 1 and bmt.rank():
            self.count += 1
        return super().forward(tokens)


def buffer_differs():
    return Program(model=OwnCount, batches=BATCHES, loss=cross_entropy)


def _one_step_less(trainer, model, batch):
    loss = cross_entropy(model, batch)
    trainer.backward(loss)
    trainer.step()
    if bmt.world_size() > 1:
        with torch.no_grad():
            next(iter(model.parameters())).mul_(1.001)
    trainer.zero_grad()
    return loss


def parameter_written():
    return Program(model=Net, batches=BATCHES, step=_one_step_less)


class Drawing(Net):
    def forward(self, tokens):
        if bmt.world_size() > 1:
            torch.rand(1)
        return super().forward(tokens)


def generator_moved():
    return Program(model=Drawing, batches=BATCHES, loss=cross_entropy, batch="same")


class Refusing(Net):
    def forward(self, tokens):
        if bmt.world_size() > 1:
            raise ConfigurationError("this model is for one process: leave it there.")
        return super().forward(tokens)


def refused():
    return Program(model=Refusing, batches=BATCHES, loss=cross_entropy)


class Dying(Net):
    def forward(self, tokens):
        if bmt.rank() == 1:
            raise ZeroDivisionError("rank 1 has had enough")
        return super().forward(tokens)


def dying():
    return Program(model=Dying, batches=BATCHES, loss=cross_entropy)


# What cannot be verified.

_SHARED = Net()


def the_same_model():
    return Program(model=lambda: _SHARED, batches=BATCHES, loss=cross_entropy)


def _unseeded():
    model = Net()
    with torch.no_grad():
        model.head.bias.fill_(random.SystemRandom().random())
    return model


def other_values_each_time():
    return Program(model=_unseeded, batches=BATCHES, loss=cross_entropy)


def not_repeatable():
    return Program(
        model=Net,
        batches=BATCHES,
        loss=lambda model, batch: (
            cross_entropy(model, batch) * (1 + random.SystemRandom().random())
        ),
    )


def dropout_on_split_rows():
    return Program(model=lambda: Net(0.3), batches=BATCHES, loss=cross_entropy)


def uneven_rows():
    return Program(
        model=Layer, batches=[torch.randn(7, 12)], loss=lambda model, x: model(x).square().mean()
    )


def fails_alone():
    return Program(
        model=Layer, batches=[torch.randn(6, 13)], loss=lambda model, x: model(x).square().mean()
    )


def no_program():
    return "a string"


def neither_loss_nor_step():
    return Program(model=Net, batches=BATCHES)


def a_model_for_its_maker():
    return Program(model=_SHARED, batches=BATCHES, loss=cross_entropy)


def no_model():
    return Program(model=lambda: 3, batches=BATCHES, loss=cross_entropy)  # type: ignore[arg-type,return-value]
