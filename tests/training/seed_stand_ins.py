"""What the documents' programs take as given: layers, models, data, a metric, and `.cuda()` where
there is no GPU.

Every model exists twice: as a BMTrain program would write it, and in plain PyTorch with the same
names, for the answer.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

import bmtrain as bmt

ROWS, LENGTH = 12, 5  # of all ranks together


class Linear(bmt.DistributedModule):
    def __init__(self, columns, rows, dtype=torch.float32):
        super().__init__()
        self.weight = bmt.DistributedParameter(
            torch.empty(rows, columns, dtype=dtype), init_method=torch.nn.init.xavier_normal_
        )
        self.bias = bmt.DistributedParameter(
            torch.empty(rows, dtype=dtype), init_method=torch.nn.init.zeros_
        )

    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


class Embedding(bmt.DistributedModule):
    def __init__(self, rows, columns, dtype=torch.float32):
        super().__init__()
        init = bmt.ParameterInitializer(torch.nn.init.normal_, mean=0.0, std=0.5)
        self.weight = bmt.DistributedParameter(
            torch.empty(rows, columns, dtype=dtype), init_method=init
        )

    def forward(self, ids):
        return F.embedding(ids, self.weight)


class PlainStack(torch.nn.ModuleList):
    def forward(self, x, *rest):
        for layer in self:
            x = layer(x, *rest)
        return x


def stack_of_blocks(layers):
    return bmt.TransformerBlockList([bmt.CheckpointBlock(layer) for layer in layers])


@dataclasses.dataclass(frozen=True)
class Parts:
    """What a model is made of."""

    linear: Callable[..., torch.nn.Module]
    embedding: Callable[..., torch.nn.Module]
    stack: Callable[[Sequence[torch.nn.Module]], torch.nn.Module]


DISTRIBUTED = Parts(Linear, Embedding, stack_of_blocks)
PLAIN = Parts(torch.nn.Linear, torch.nn.Embedding, PlainStack)


class SomeTransformerBlock(torch.nn.Module):
    """Takes the arguments of the quick start's `module(x, 1, 2, 3)`."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(8, 8)

    def forward(self, x, a, b, c):
        return x + torch.tanh(self.inner(x.view(-1, 8))).view(-1) * (a + b - c + 0.5)


class SomeDistributedBlock(bmt.DistributedModule):
    """The same, with the distributed parameters that BMTrain asks for."""

    def __init__(self):
        super().__init__()
        self.inner = Linear(8, 8)

    forward = SomeTransformerBlock.forward


class TransformerLayer(torch.nn.Module):
    """A mean of the tokens that each sees, and a feed-forward network, normalised before."""

    def __init__(self, dim, dim_ff, dtype, parts):
        super().__init__()
        self.mix, self.up = (
            parts.linear(dim, dim, dtype=dtype),
            parts.linear(dim, dim_ff, dtype=dtype),
        )
        self.down = parts.linear(dim_ff, dim, dtype=dtype)

    def forward(self, x, mask):
        shares = mask / mask.sum(-1, keepdim=True).clamp(min=1)
        x = x + shares.to(x.dtype) @ self.mix(F.layer_norm(x, x.shape[-1:]))
        return x + self.down(F.gelu(self.up(F.layer_norm(x, x.shape[-1:]))))


class GPT(bmt.DistributedModule):
    """The README's model: its arguments, `model(ids, positions, mask)`, at a hundredth of the
    size.
    """

    def __init__(
        self,
        num_layers,
        vocab_size,
        dim_model,
        dim_head,
        num_heads,
        dim_ff,
        max_distance,
        bias,
        dtype,
        parts=DISTRIBUTED,
    ):
        super().__init__()
        if dim_head * num_heads != dim_model or not bias or max_distance < LENGTH:
            raise ValueError("these are not the README's arguments")
        dim, ff = dim_model // 64, dim_ff // 64
        self.word = parts.embedding(vocab_size // 256, dim, dtype=dtype)
        self.position = parts.embedding(LENGTH, dim, dtype=dtype)
        self.transformers = parts.stack(
            [TransformerLayer(dim, ff, dtype, parts) for _ in range(num_layers // 4)]
        )

    def forward(self, ids, pos, mask):
        causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=ids.device).tril()
        x = self.transformers(self.word(ids) + self.position(pos), causal[None] & mask[:, None, :])
        return F.linear(F.layer_norm(x, x.shape[-1:]), self.word.weight)


README_SIZES = {
    "num_layers": 8,
    "vocab_size": 10240,
    "dim_model": 2560,
    "dim_head": 80,
    "num_heads": 32,
    "dim_ff": 8192,
    "max_distance": 1024,
    "bias": True,
}


def batch(number, rank, world_size):
    """A rank's rows of tokens, lengths and next tokens; outside a run on the CPU."""
    device = bmt.device() if bmt.is_initialized() else torch.device("cpu")
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(0, 40, (ROWS, LENGTH + 1), generator=generator)
    length = torch.randint(1, LENGTH + 1, (ROWS,), generator=generator)
    parts = (ids[:, :-1].contiguous(), length, ids[:, 1:].contiguous())
    first, second, third = (part.chunk(world_size)[rank].to(device) for part in parts)
    return first, second, third


def load_data(number):
    """The README's `enc_input, enc_length, targets` of an iteration."""
    return batch(number, bmt.rank(), bmt.world_size())


def first_of(count):
    """A `range` that ends early."""
    return lambda stop: itertools.islice(iter(range(stop)), count)


def offer_cuda():
    """Where there is no GPU, `.cuda()` stays on the CPU."""
    if not torch.cuda.is_available():
        torch.Tensor.cuda = lambda self: self  # type: ignore[method-assign, assignment, misc]
