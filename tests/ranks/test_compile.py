"""torch.compile of blocks: by default and on request, compiled once for equal blocks, exact, and
never in the way.
"""

import contextlib
import copy
import io
import warnings
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.ranks import models
from tests.ranks.passes import Layer, ask, blocks_of, compare, gradients
from tests.ranks.runner import on_ranks
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

import bmtrain as bmt
from bmtrain.compile import backend
from bmtrain.compile.programs import Programs
from bmtrain.recompute.level import Level
from bmtrain.runtime import world

pytestmark = pytest.mark.compiler
BY_DEFAULT = {"compile": True}


class Lowering(models.Counting):
    """A backend that counts graphs and runs them as they are, or traces them forward and backward
    as torch's does, or fails.
    """

    def __init__(self, traces=False, fails=False):
        super().__init__()
        self.traces, self.fails = traces, fails

    def __call__(self, graph, inputs, **options):
        run = super().__call__(graph, inputs)
        if self.fails:
            raise RuntimeError("this processor is unknown\nand more")
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs) if self.traces else run


def lowering(traces=False, fails=False):
    """Put a Lowering in the place of torch's compiler; all structures are new."""
    torch._dynamo.reset()
    if bmt.is_initialized():
        programs = world.current().service(Programs)
        programs._structures.clear()
        programs._warned.clear()
    backend.inductor = own = Lowering(traces, fails)
    return own


def check(layers, what, x=None, call=ask, **options):
    """Two passes of blocks are those of the layers. Returns the blocks."""
    plain = nn.ModuleList(layers)
    blocks = blocks_of(plain, **options)
    for number in range(2):
        given = torch.linspace(-1, 1, 18).view(3, 6) if x is None else x
        compare(plain, blocks, f"{what} {options}, pass {number}", given, call)
    return blocks


def warned(layers, what, **options):
    """What is said of uncompiled blocks in a check."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        check(layers, what, **options)
    messages = [str(each.message) for each in said]
    return [text for text in messages if "runs uncompiled" in text]


@pytest.mark.parametrize(
    ("zero_level", "level"),
    [
        (3, Level.BLOCK),
        (2, Level.NOTHING),
        pytest.param(3, Level.CHEAP, marks=pytest.mark.long),
        pytest.param(2, Level.OFFLOADED, marks=pytest.mark.long),
    ],
)
@on_ranks(2, init=BY_DEFAULT)
def test_equal_blocks_compile_once(zero_level, level):
    """One graph, passes without gradients run uncompiled, and all is exact; on request one graph
    more at most for the first input without gradient.
    """
    own = lowering(traces=True)
    plain = nn.ModuleList([Layer() for _ in range(3)])
    options = {"use_checkpoint": level, "zero_level": zero_level}
    blocks = check([*plain], "by default", **options)
    assert own.num_graphs == 1, f"compiled {own.num_graphs} graphs for equal blocks"
    with torch.no_grad():
        blocks[0](torch.ones(2, 6))
    assert own.num_graphs == 1, "an evaluation compiled"
    counting = models.Counting()
    blocks = blocks_of(plain, **options)
    for block in blocks:
        block.compile(backend=counting)
    compare(plain, blocks, f"on request, {level}", torch.ones(3, 6))
    assert 1 <= counting.num_graphs <= 2


class Scaled(Layer):
    """Reads a whole number of its own, as numbers of layers are."""

    def __init__(self, number):
        super().__init__()
        self.number = number

    def forward(self, x):
        return super().forward(x) * (1 + self.number / 16)


@on_ranks(1, init=BY_DEFAULT)
def test_what_varies_does_not_use_up_a_limit():
    """torch gives up on a function after 8 forms. Numbers of layers and lengths become variables;
    every class has a function of its own.
    """
    own = lowering()
    check([Layer() for _ in range(12)], "equal", use_checkpoint=False)
    assert own.num_graphs == 1
    check([Scaled(number) for number in range(20)], "numbered", use_checkpoint=False)
    assert own.num_graphs <= 11, f"compiled {own.num_graphs} graphs for 20 layers with numbers"
    own = lowering()
    kinds: list[Any] = [type(f"Layer{number}", (Layer,), {}) for number in range(10)]
    for number, kind in enumerate(kinds):
        kind.forward = lambda self, x, number=number: Layer.forward(self, x) * (number / 8)
    check([kind() for kind in kinds], "classes", use_checkpoint=False)
    assert own.num_graphs == 10
    own = lowering()
    block = bmt.Block(Layer(), use_checkpoint=False)
    for length in (3, 5, 7, 9, 3, 11, 2, 4, 3, 20, 21):
        block(torch.ones(2, length, 6)).sum().backward()
    assert own.num_graphs <= 3, f"compiled {own.num_graphs} graphs for varying lengths"


class WithItem(Layer):
    def forward(self, x):
        return super().forward(x) * (2 if x.sum().item() > 0 else 1)


class Remembers(Layer):
    def forward(self, x):
        self.seen = [*self.__dict__.get("seen", []), x.detach()]
        return super().forward(x)


class Counts(Layer):
    """Reads a buffer, then changes it: what was read must be what backward sees."""

    count: Tensor

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.ones(6))

    def forward(self, x):
        factor = self.count * 1.0
        y = torch.sin(super().forward(x) * factor)
        with torch.no_grad():
            self.count.add_(1)
        return y


@torch.library.custom_op("others::noise", mutates_args=())
def noise(x: Tensor) -> Tensor:
    """As an operator of another library that draws random numbers and does not say so."""
    return (torch.rand_like(x) > 0.5).to(x.dtype)


@noise.register_fake
def _(x):
    return torch.empty_like(x)


class Noisy(Layer):
    def forward(self, x):
        return super().forward(x) * noise(x.detach())


@on_ranks(2, init=BY_DEFAULT)
def test_what_is_not_safe_in_one_graph_runs_uncompiled():
    """Said once per class, in one line; the numbers are right from the first pass on, also where
    they would be random ones.
    """
    for kind, recompute, reason in (
        (WithItem, False, "("),
        (WithItem, True, "("),
        (Remembers, True, "("),
        (Counts, False, "(UnsafeError: "),
        (Counts, True, "(UnsafeError: "),
        (Noisy, True, "(UnsafeError: "),
    ):
        own = lowering(traces=True)
        said = warned([kind(), kind()], kind.__name__, use_checkpoint=recompute)
        assert len(said) == 1, (kind, said)
        assert f"{kind.__name__} runs uncompiled {reason}" in said[0], said
        assert "\n" not in said[0] and own.num_graphs == 0, said


class Cache:
    """Whose contents may change."""


class Caching(Layer):
    def forward(self, x, cache=None):
        return super().forward(x)


@on_ranks(1, init=BY_DEFAULT)
def test_what_is_given_changing_objects_runs_uncompiled():
    own = lowering()
    plain = nn.ModuleList([Caching()])
    (block,) = blocks = blocks_of(plain)
    with pytest.warns(UserWarning, match="is given a Cache, whose contents change"):
        block(torch.ones(3, 6), [{"layers": (Cache(),)}])
    assert own.num_graphs == 0
    compare(plain, blocks, "without it", torch.ones(3, 6))
    assert own.num_graphs == 1


class Summing(Layer):
    def forward(self, x):
        return bmt.distributed.all_reduce(super().forward(x), "avg")


class SummingPlainly(Layer):
    def forward(self, x):
        total = x.detach().clone()
        dist.all_reduce(total)
        return super().forward(x) + total


def printing(forward):
    """As `forward`, in two graphs."""

    def run(x):
        out = forward(x)
        print(out.norm().item(), file=io.StringIO())
        return out

    return run


@on_ranks(2, init=BY_DEFAULT)
def test_ranks_may_differ_in_what_compiles():
    """A graph that breaks, or a compiler that fails, on one rank or on both: uncompiled or not,
    ranks gather alike. Collectives stay uncompiled: ranks might order them differently.
    """
    for failing, recompute, level in ((0, False, 3), (1, True, 3), (2, True, 2)):
        own = lowering(fails=failing in (bmt.rank(), 2))
        layers = [Layer() for _ in range(3)]
        said = warned(layers, "failing", use_checkpoint=recompute, zero_level=level)
        assert len(said) == own.fails and all("processor is unknown" in each for each in said), said
        assert own.num_graphs == 1, "tried again"
    lowering()
    plain = nn.ModuleList([Layer(), Layer()])
    blocks = blocks_of(plain)
    if bmt.rank() == 0:
        blocks[0].up.forward = printing(blocks[0].up.forward)
    for block in blocks:
        block.compile(backend="eager")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        compare(plain, blocks, "a break", torch.ones(3, 6))
    assert sum("runs uncompiled" in str(each.message) for each in said) == (bmt.rank() == 0)
    for kind in (Summing, SummingPlainly):
        own = lowering()
        block = bmt.Block(kind(), use_checkpoint=False)
        again = bmt.Block(copy.deepcopy(block._inner), use_checkpoint=False, compile=False)
        again.load_state_dict(block.state_dict())
        for number in range(2):
            outs = []
            for each in (block, again):
                each.zero_grad()
                is_first = number == 0 and each is block
                with pytest.warns(match="it communicates by") if is_first else nullcontext():
                    outs.append(each(torch.full((2, 6), bmt.rank() + 1.0)))
                outs[-1].square().sum().backward()
            assert torch.equal(outs[0], outs[1])
            models.assert_same_dicts(gradients(block), gradients(again), kind.__name__)
        assert own.num_graphs == 0, f"{kind.__name__} was compiled"


class Nest(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Layer()
        self.last = nn.Linear(6, 6)

    def forward(self, x):
        return self.last(self.inner(x))


class Wrong(Layer):
    def forward(self, x):
        if x.shape[0] == 7:
            raise LookupError("seven rows")
        return super().forward(x[:, :5] if x.shape[0] == 5 else x)


@pytest.mark.parametrize("recompute", [False, pytest.param(True, marks=pytest.mark.long)])
@on_ranks(1, init=BY_DEFAULT)
def test_what_programs_do_to_blocks(recompute):
    """Statistics, blocks in blocks, hooks and functions put in after compiling, a graph that is
    kept, errors of the module's own, after which it compiles all the same.
    """
    lowering(traces=True)
    x = torch.randn(5, 6)
    if not recompute or torch.__version__ >= "2.11":
        moving = [nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 6)) for _ in range(2)]
        check(moving, "running statistics", x, use_checkpoint=recompute)
    own = lowering(traces=True)
    plain = nn.ModuleList([Nest()])
    nested: Any = copy.deepcopy(plain[0])
    nested.inner = bmt.Block(nested.inner, use_checkpoint=recompute)
    blocks = nn.ModuleList([bmt.Block(nested, use_checkpoint=recompute)])
    compare(plain, blocks, "a block inside a block", x)
    assert own.num_graphs == 1, "the inner block alone compiles"

    plain = nn.ModuleList([Layer()])
    blocks = blocks_of(plain, use_checkpoint=recompute)
    compare(plain, blocks, "before the hook", x, times=2)
    both = [plain[0], blocks[0]]
    hooks = [
        layer.get_submodule("up").register_forward_hook(lambda module, args, out: out * 3)
        for layer in both
    ]
    compare(plain, blocks, "with a hook that came later", x)
    for hook in hooks:
        hook.remove()
    compare(plain, blocks, "without it", x)
    for kind in (Layer, nn.Linear):
        forward = kind.forward
        with mock.patch.object(kind, "forward", lambda self, x, own=forward: own(self, x) / 2):
            compare(plain, blocks, f"with another forward of {kind}", x)
        compare(plain, blocks, f"with the former one of {kind}", x)
    for up in (layer.get_submodule("up") for layer in both):
        up.forward = lambda x, up=up: F.linear(x, up.weight)
    compare(plain, blocks, "with a forward that was replaced", x)
    for layer in both:
        layer.forward = lambda x, layer=layer: layer.down(layer.up(x)) - x
    compare(plain, blocks, "with another one of its own", x)

    own = lowering()
    plain = nn.ModuleList([Wrong()])
    (block,) = blocks = blocks_of(plain, use_checkpoint=recompute)
    with pytest.raises(LookupError, match="seven rows"):
        block(torch.ones(7, 6))
    with pytest.raises(RuntimeError, match="normalized_shape"):
        block(torch.ones(5, 6))
    assert own.num_graphs == 0
    compare(plain, blocks, "after errors", torch.ones(3, 6))
    assert own.num_graphs == 1, "an error of the module itself ended its compiling"


@on_ranks(1, init=BY_DEFAULT)
def test_hooks_that_come_after_compiling_on_request():
    """Hooks of a module inside, of the block, of all modules: each runs, and ends with its handle."""
    plain = nn.ModuleList([Layer(), Layer()])
    blocks = blocks_of(plain)
    counting = models.Counting()
    for block in blocks:
        block.compile(backend=counting)
    x = torch.ones(3, 6)
    compare(plain, blocks, "before the hooks", x)
    num_graphs = counting.num_graphs
    registers = [
        [layer.get_submodule("up").register_forward_hook for layer in (plain[0], blocks[0])],
        [layer.register_forward_hook for layer in (plain[1], blocks[1])],
        [nn.modules.module.register_module_forward_hook],
    ]
    for number, each in enumerate(registers):
        with contextlib.ExitStack() as handles:
            for register in each:
                handles.enter_context(register(lambda module, args, out: out * 3))
            compare(plain, blocks, f"with hook {number}", x)
        compare(plain, blocks, f"without hook {number}", x)
    assert counting.num_graphs == num_graphs > 0


class Watching(TorchFunctionMode):
    """Counts calls of one function."""

    count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.tanh
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("default", [False, True, None])
@on_ranks(1, join=False)
def test_who_decides(default):
    """A block may say; else the run's default does, and a CPU does not compile by itself. Modes of
    torch see every call, as in a module that is not compiled.
    """
    bmt.init_distributed(device="cpu", compile=default)
    own = lowering()

    def step(**options):
        bmt.Block(Layer(), **options)(torch.ones(2, 6)).sum().backward()

    step(compile=False)
    assert own.num_graphs == 0
    step()
    assert own.num_graphs == bool(default)
    own = lowering()
    with Watching() as watching:
        step(compile=True, use_checkpoint=False)
    assert (watching.count, own.num_graphs) == (1, 0)
    with FlopCounterMode(display=False) as flops:
        step(compile=True)
    assert flops.get_total_flops() > 0 and own.num_graphs == 0
    with torch.device("cpu"):
        step(compile=True)
    assert own.num_graphs == 1, "a default device is no spectator"


@on_ranks(1, init=BY_DEFAULT, timeout=120)
def test_the_real_compiler():
    blocks = check([nn.Sequential(nn.Linear(6, 6), nn.Tanh())], "Inductor", use_checkpoint=True)
    assert torch._dynamo.utils.counters["inductor"], "Inductor was not used"
    assert not models.is_refused(blocks[0])
    for wrong in ({"mode": "fastest"}, {"options": {"fastest": 1}}):
        with pytest.raises(RuntimeError, match="fastest"):
            blocks[0].compile(**wrong)
