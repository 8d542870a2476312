"""torch.compile of blocks: by default and on request, compiled once for equal blocks, exact, and
never in the way.
"""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.ranks import models
from tests.ranks.runner import run_ranks
from tests.tensors import grad_of
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

import bmtrain as bmt
from bmtrain.compile import backend
from bmtrain.recompute.level import Level

BY_DEFAULT = {"compile": True}


class Layer(nn.Module):
    def __init__(self, dim: int = 6) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 11), nn.Linear(11, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Lowering(models.Counting):
    """A backend that counts graphs and runs them as they are, or traces them forward and backward
    as torch's does, or fails.
    """

    def __init__(self, traces: bool = False, fails: bool = False) -> None:
        super().__init__()
        self.traces, self.fails = traces, fails

    def __call__(
        self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor], **options: Any
    ) -> Callable[..., object]:
        run = super().__call__(graph, inputs)
        if self.fails:
            raise RuntimeError("this processor is unknown\nand more")
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs) if self.traces else run


def lowering(traces: bool = False, fails: bool = False) -> Lowering:
    """Put a Lowering in the place of torch's compiler."""
    torch._dynamo.reset()
    backend.inductor = own = Lowering(traces, fails)  # type: ignore[assignment]
    return own


Layers = Sequence[nn.Module] | nn.ModuleList


def compare(plain: Layers, blocks: Layers, what: str, x: torch.Tensor | None = None) -> None:
    """Outputs, all gradients and buffers of two passes, of one rank's rows that all ranks have."""
    for number in range(2):
        losses, grads = [], []
        for net in (plain, blocks):
            h = leaf = (
                torch.linspace(-1, 1, 18).view(3, 6) if x is None else x.clone()
            ).requires_grad_()
            for layer in net:
                layer.zero_grad()
                h = layer(h)
            losses.append(h.square().sum() / (1 if net is plain else bmt.world_size()))
            losses[-1].backward()
            grads.append(grad_of(leaf) * (1 if net is plain else bmt.world_size()))
        name = f"{what}, pass {number}"
        models.assert_same(losses[1].detach() * bmt.world_size(), losses[0].detach(), name)
        models.assert_same(grads[1], grads[0], name)
        for mine, theirs in zip(blocks, plain, strict=True):
            models.assert_same_dicts(
                models.full_gradients(mine), models.plain_gradients(theirs), name
            )
            models.assert_same_dicts(dict(mine.named_buffers()), dict(theirs.named_buffers()), name)


def pairs(layers: Sequence[nn.Module], **options: Any) -> tuple[nn.ModuleList, nn.ModuleList]:
    """The layers as they are, and as blocks."""
    return nn.ModuleList(layers), nn.ModuleList(
        [bmt.Block(copy.deepcopy(layer), **options) for layer in layers]
    )


def on_request() -> None:
    for level, recompute in ((2, False), (3, False), (3, True)):
        torch._dynamo.reset()
        torch.manual_seed(3)
        plain, blocks = pairs(
            [Layer() for _ in range(5)], use_checkpoint=recompute, zero_level=level
        )
        counting = models.Counting()
        for block in blocks:
            block.compile(backend=counting)
        compare(plain, blocks, f"ZeRO-{level}, recompute={recompute}, {bmt.world_size()} ranks")
        assert counting.num_graphs <= 2, f"compiled {counting.num_graphs} graphs for 5 equal blocks"


@pytest.mark.parametrize("world_size", [1, 2])
def test_equal_blocks_compile_once(world_size: int) -> None:
    """Five equal blocks give one graph (one more at most for the first input without gradient), and
    plain gradients.
    """
    run_ranks(on_request, world_size, timeout=60)


def by_default(num_layers: int, zero_level: int, recompute: Level) -> None:
    own = lowering(traces=num_layers < 40)
    torch.manual_seed(3)
    plain, blocks = pairs(
        [Layer() for _ in range(num_layers)], use_checkpoint=recompute, zero_level=zero_level
    )
    compare(plain, blocks, f"ZeRO-{zero_level}, {recompute}, {bmt.world_size()} ranks")
    assert own.num_graphs == 1, f"compiled {own.num_graphs} graphs for {num_layers} equal blocks"
    with torch.no_grad():
        blocks[0](torch.ones(2, 6))
    assert own.num_graphs == 1, "an evaluation compiled"


@pytest.mark.parametrize(
    ("world_size", "num_layers", "zero_level", "recompute"),
    [
        (1, 40, 3, Level.NOTHING),
        (1, 5, 3, Level.BLOCK),
        (2, 5, 3, Level.CHEAP),
        (2, 5, 3, Level.BLOCK),
        (2, 5, 2, Level.NOTHING),
    ],
)
def test_equal_blocks_compile_once_by_default(
    world_size: int, num_layers: int, zero_level: int, recompute: Level
) -> None:
    """One graph, passes without gradients run uncompiled, and all is exact."""
    run_ranks(
        by_default, world_size, num_layers, zero_level, recompute, init=BY_DEFAULT, timeout=60
    )


class Scaled(Layer):
    """Reads a whole number of its own, as numbers of layers are."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1 + self.number / 16)


def numbered_layers() -> None:
    own = lowering()
    torch.manual_seed(3)
    plain, blocks = pairs([Scaled(number) for number in range(20)], use_checkpoint=False)
    compare(plain, blocks, "numbered")
    assert own.num_graphs <= 10, f"compiled {own.num_graphs} graphs for 20 layers with numbers"


def test_numbers_of_layers_become_variables() -> None:
    run_ranks(numbered_layers, 1, init=BY_DEFAULT)


def many_classes() -> None:
    own = lowering()
    kinds: list[Any] = [type(f"Layer{number}", (Layer,), {}) for number in range(12)]
    for number, kind in enumerate(kinds):
        kind.forward = _times(number + 1)
    plain, blocks = pairs([kind() for kind in kinds], use_checkpoint=False)
    compare(plain, blocks, "twelve classes")
    assert own.num_graphs == 12, f"compiled {own.num_graphs} graphs for 12 classes"


def _times(factor: int) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    return lambda self, x: Layer.forward(self, x) * (factor / 8)


def test_many_classes_do_not_use_up_a_limit() -> None:
    """torch gives up on a function after 8 forms: every class has one of its own."""
    run_ranks(many_classes, 1, init=BY_DEFAULT)


def lengths() -> None:
    own = lowering()
    block = bmt.Block(Layer(), use_checkpoint=False)
    for length in (3, 5, 7, 9, 3, 11, 2, 4, 3, 20, 21):
        block(torch.ones(2, length, 6)).sum().backward()
    assert own.num_graphs <= 3, f"compiled {own.num_graphs} graphs for varying lengths"


def test_lengths_become_variables() -> None:
    run_ranks(lengths, 1, init=BY_DEFAULT)


def break_on_one_rank() -> None:
    layers = [Layer() for _ in range(2)]
    blocks = [bmt.Block(copy.deepcopy(layer), use_checkpoint=True) for layer in layers]
    if bmt.rank() == 0:
        blocks[0].up.register_forward_hook(
            lambda module, args, out: print(out.norm().item(), file=io.StringIO())
        )
    for block in blocks:
        block.compile(backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is said on that rank
        compare(nn.ModuleList(layers), nn.ModuleList(blocks), "break")


def test_a_graph_that_breaks_on_one_rank() -> None:
    """Its call begins anew there, and gathers no more often than on the others."""
    run_ranks(break_on_one_rank, 2)


class WithItem(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (2 if x.sum().item() > 0 else 1)


class Remembers(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = [*self.__dict__.get("seen", []), x.detach()]
        return super().forward(x)


def not_one_graph(kind: type[Layer], recompute: bool) -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        plain, blocks = pairs([kind(), kind()], use_checkpoint=recompute)
        compare(plain, blocks, f"{kind.__name__}, recompute={recompute}")
    told = [str(each.message) for each in said if each.category is UserWarning]
    assert len(told) == 1, told
    assert kind.__name__ in told[0] and "uncompiled" in told[0] and "\n" not in told[0], told


@pytest.mark.parametrize(
    ("world_size", "kind", "recompute"),
    [(1, WithItem, False), (2, WithItem, True), (1, Remembers, True)],
)
def test_what_is_no_graph_runs_uncompiled(
    world_size: int, kind: type[Layer], recompute: bool
) -> None:
    """Said once per class; the numbers are right from the first pass on."""
    run_ranks(not_one_graph, world_size, kind, recompute, init=BY_DEFAULT)


class Counts(Layer):
    """Reads a buffer, then changes it: what was read must be what backward sees."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        factor = self.count * 1.0
        y = torch.sin(super().forward(x) * factor)
        with torch.no_grad():
            self.count.add_(1)
        return y


@torch.library.custom_op("others::noise", mutates_args=())
def noise(x: torch.Tensor) -> torch.Tensor:
    """As an operator of another library that draws random numbers and does not say so."""
    return (torch.rand_like(x) > 0.5).to(x.dtype)


@noise.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class Noisy(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * noise(x.detach())


def unsafe(kind: type[Layer], recompute: bool) -> None:
    own = lowering(traces=True)
    torch.manual_seed(3)
    plain, blocks = pairs([kind()], use_checkpoint=recompute)
    grads = []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for net in (plain[0], blocks[0]):
            torch.manual_seed(5)
            leaf = torch.linspace(-1, 1, 18).view(3, 6).requires_grad_()
            net(leaf).square().sum().backward()
            grads.append(grad_of(leaf))
    models.assert_same(grads[1], grads[0], f"{kind.__name__}, recompute={recompute}")
    assert own.num_graphs == 0, "compiled"
    assert [str(each.message) for each in said if "UnsafeError" in str(each.message)]


@pytest.mark.parametrize(("kind", "recompute"), [(Counts, False), (Counts, True), (Noisy, True)])
def test_what_the_compiler_would_get_wrong_runs_uncompiled(
    kind: type[Layer], recompute: bool
) -> None:
    run_ranks(unsafe, 1, kind, recompute, init=BY_DEFAULT)


def failing(only_rank: int | None) -> None:
    own = lowering(fails=only_rank in (None, bmt.rank()))
    for recompute, level in ((False, 3), (True, 3), (True, 2)):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            plain, blocks = pairs(
                [Layer(dim) for dim in (6, 6, 6)], use_checkpoint=recompute, zero_level=level
            )
            compare(plain, blocks, f"failing compiler, recompute={recompute}, ZeRO-{level}")
        told = [str(each.message) for each in said if "Layer runs uncompiled" in str(each.message)]
        assert len(told) == (own.fails and not recompute), told
        assert all("this processor is unknown" in each for each in told), told


@pytest.mark.parametrize(("world_size", "only_rank"), [(1, None), (2, None), (2, 1)])
def test_a_failing_compiler_is_done_without(world_size: int, only_rank: int | None) -> None:
    """On one of two ranks too: uncompiled or not, both gather alike."""
    run_ranks(failing, world_size, only_rank, init=BY_DEFAULT)


class Wrong(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 7:
            raise LookupError("seven rows")
        return super().forward(x[:, :5] if x.shape[0] == 5 else x)


def own_errors() -> None:
    own = lowering()
    block = bmt.Block(Wrong(), use_checkpoint=False)
    with pytest.raises(LookupError, match="seven rows"):
        block(torch.ones(7, 6))
    with pytest.raises(RuntimeError, match="normalized_shape"):
        block(torch.ones(5, 6))
    assert own.num_graphs == 0
    block(torch.ones(3, 6)).sum().backward()
    assert own.num_graphs == 1, "an error of the module itself ended its compiling"


def test_errors_of_a_module_are_its_own() -> None:
    """What the module raises is raised, and it compiles all the same afterwards."""
    run_ranks(own_errors, 1, init=BY_DEFAULT)


class Summing(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return bmt.distributed.all_reduce(super().forward(x), "avg")


class SummingPlainly(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = x.detach().clone()
        dist.all_reduce(total)
        return super().forward(x) + total


def communicating() -> None:
    for kind in (Summing, SummingPlainly):
        own = lowering()
        torch.manual_seed(5)
        block = bmt.Block(kind(), use_checkpoint=False)
        again = bmt.Block(copy.deepcopy(block._inner), use_checkpoint=False, compile=False)
        again.load_state_dict(block.state_dict())
        for _ in range(2):
            outs = []
            for each in (block, again):
                each.zero_grad()
                outs.append(each(torch.full((2, 6), bmt.rank() + 1.0)))
                outs[-1].square().sum().backward()
            assert torch.equal(outs[0], outs[1])
            models.assert_same_dicts(
                models.full_gradients(block), models.full_gradients(again), kind.__name__
            )
        assert own.num_graphs == 0, f"{kind.__name__} was compiled"


def test_collectives_stay_uncompiled() -> None:
    """Ranks might order them differently."""
    run_ranks(communicating, 2, init=BY_DEFAULT)


class Nest(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = Layer(), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.inner(x))


class Moving(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.BatchNorm1d(6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(x))


def special(recompute: bool) -> None:
    own = lowering(traces=True)
    if recompute and torch.__version__ < "2.11":
        warnings.filterwarnings("ignore", message="Moving runs uncompiled")
    plain, blocks = pairs([Moving(), Moving()], use_checkpoint=recompute)
    compare(plain, blocks, "running statistics", torch.randn(5, 6))

    own = lowering(traces=True)
    whole = Nest()
    nested = copy.deepcopy(whole)
    nested.inner = bmt.Block(nested.inner, use_checkpoint=recompute)  # type: ignore[assignment]
    outer = bmt.Block(nested, use_checkpoint=recompute)
    compare([whole], [outer], "a block inside a block")
    assert own.num_graphs == 1, "the inner block alone compiles"

    plain, blocks = pairs([Layer()], use_checkpoint=recompute)
    compare(plain, blocks, "before the hook")
    for layer in (plain[0], blocks[0]):
        handle = layer.get_submodule("up").register_forward_hook(lambda module, args, out: out * 3)
    compare(plain, blocks, "with a hook that came later")
    handle.remove()

    plain, blocks = pairs([Layer()], use_checkpoint=recompute)
    compare(plain, blocks, "before the replacement")
    for up in (plain[0].get_submodule("up"), blocks[0].get_submodule("up")):
        up.forward = lambda x, up=up: F.linear(x, up.weight)
    compare(plain, blocks, "with a forward that was replaced")
    for layer in (plain[0], blocks[0]):
        layer.forward = lambda x, layer=layer: layer.down(layer.up(x)) - x
    compare(plain, blocks, "with another one of its own")

    x = torch.ones(2, 6, requires_grad=True)
    y = blocks[0](x).sum()
    y.backward(retain_graph=True)
    first = grad_of(x).clone()
    y.backward()
    assert torch.equal(grad_of(x), 2 * first)


@pytest.mark.parametrize("recompute", [False, True])
def test_what_programs_do_to_blocks(recompute: bool) -> None:
    """Statistics, blocks in blocks, hooks and functions put in after compiling, a graph that is
    kept.
    """
    run_ranks(special, 1, recompute, init=BY_DEFAULT)


class Watching(TorchFunctionMode):
    """Counts calls of one function."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.tanh
        return func(*args, **(kwargs or {}))


def watched() -> None:
    own = lowering()
    block = bmt.Block(Layer(), use_checkpoint=False)
    with Watching() as watching:
        block(torch.ones(2, 6)).sum().backward()
    assert (watching.count, own.num_graphs) == (1, 0)
    with FlopCounterMode(display=False) as flops:
        block(torch.ones(2, 6)).sum().backward()
    assert flops.get_total_flops() > 0 and own.num_graphs == 0
    with torch.device("cpu"):
        block(torch.ones(2, 6)).sum().backward()
    assert own.num_graphs == 1, "a default device is no spectator"


def test_who_looks_on_sees_all() -> None:
    """Modes of torch see every call, as in a module that is not compiled."""
    run_ranks(watched, 1, init=BY_DEFAULT)


def chosen() -> None:
    own = lowering()
    bmt.Block(Layer(), compile=False)(torch.ones(2, 6)).sum().backward()
    assert own.num_graphs == 0
    bmt.Block(Layer(), compile=True)(torch.ones(2, 6)).sum().backward()
    assert own.num_graphs == 1


@pytest.mark.parametrize("default", [False, True, None])
def test_a_block_may_say(default: bool | None) -> None:
    run_ranks(chosen, 1, init={"compile": default})


def not_on_a_cpu() -> None:
    own = lowering()
    bmt.Block(Layer())(torch.ones(2, 6)).sum().backward()
    assert own.num_graphs == 0


def test_a_cpu_does_not_compile_by_itself() -> None:
    run_ranks(not_on_a_cpu, 1)


def by_inductor() -> None:
    torch.manual_seed(3)
    plain, blocks = pairs([Layer(), Layer()], use_checkpoint=True)
    compare(plain, blocks, "Inductor")
    assert torch._dynamo.utils.counters["inductor"], "Inductor was not used"
    assert not models.is_refused(blocks[0])


def test_the_real_compiler() -> None:
    run_ranks(by_inductor, 1, init=BY_DEFAULT, timeout=120)
