"""What a second start of a program takes from torch's caches of compiled code: all of it, and
nothing that was compiled of other sources.
"""

import functools
import os
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.ranks.runner import run_ranks
from torch import nn

import bmtrain as bmt
from bmtrain.compile import cache, fusions
from bmtrain.recompute.level import Level

DIM, CLASSES = 16, 32
NOTHING = {"hit": 0, "miss": 0, "bypass": 0, "compiled": 0, "uncached": 0}
BY_DEFAULT = {"compile": True}
# torch's compiler of itself
pytestmark = [
    pytest.mark.compiler,
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
]


class Layer(nn.Module):
    """Norms and products as those of a GPT, with its form of GELU between them."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.LayerNorm(DIM), nn.RMSNorm(DIM)
        self.up, self.down = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x):
        h = self.up(self.first(x))
        return self.last(x + self.down(F.gelu(h, approximate="tanh")))


class Head(nn.Module):
    """GELU apart from a product, and a loss without the logits of all rows."""

    def __init__(self):
        super().__init__()
        self.project, self.loss = nn.Linear(DIM, CLASSES), bmt.loss.FusedLinearCrossEntropy()

    def forward(self, x, targets):
        h = F.gelu(x, approximate="tanh")
        return self.loss(h, self.project.weight, targets, self.project.bias)


def use(folder):
    """Keep compiled code here, and put this library's functions in on a CPU too."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    os.environ["TRITON_CACHE_DIR"] = str(Path(folder, "triton"))
    torch._inductor.config.cpp.vec_isa_ok = False  # else several processes try what there is
    rewrite = fusions.rewrite
    fusions.rewrite = lambda graph, wanted: rewrite(graph, lambda _: True)


def counts():
    """What torch has taken from its caches in this process, and what it has not."""
    found = torch._dynamo.utils.counters
    aot = {name: found["aot_autograd"][f"autograd_cache_{name}"] for name in ("hit", "miss")}
    return aot | {
        "bypass": found["aot_autograd"]["autograd_cache_bypass"],
        "compiled": found["inductor"]["fxgraph_cache_miss"],
        "uncached": found["inductor"]["fxgraph_cache_bypass"],
    }


def train(folder):
    """Losses of two steps of blocks at each level, in FP8, compiled on request, and what torch took
    from its caches.
    """
    use(folder)
    # Inductor of torch 2.11 uses it itself.
    warnings.filterwarnings("ignore", message="`torch.jit.script_method` is deprecated")
    torch.manual_seed(0)
    plain = functools.partial(bmt.Block, use_checkpoint=False)
    blocks = nn.ModuleList(
        [
            plain(nn.Linear(DIM, DIM), fp8=True),
            bmt.Block(nn.Linear(DIM, DIM), use_checkpoint=Level.CHEAP),
            bmt.Block(nn.Linear(DIM, DIM), use_checkpoint=True),
            plain(Layer()),
            plain(Head()),
        ]
    )
    blocks[3].compile()
    optimizer = bmt.optim.AdamOptimizer(blocks.parameters(), lr=0.1)
    x, targets = torch.randn(6, DIM).to(bmt.device()), torch.arange(6, device=bmt.device())
    losses = []
    for _ in range(2):
        h = x.clone().requires_grad_()
        for block in blocks[:-1]:
            h = block(h)
        loss = blocks[-1](h, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, counts()


def compiles_once(folder, device="cpu"):
    """Start twice: each of five structures is traced and compiled once, forward and backward, by
    the first start; the second one loads them and computes the same, to the bit.
    """

    def start():
        (found,) = run_ranks(train, 1, str(folder), device=device, init=BY_DEFAULT, timeout=120)
        return found

    losses, cold = start()
    assert cold == NOTHING | {"miss": 5, "compiled": 10}
    code = code_in(folder)
    assert code
    assert start() == (losses, NOTHING | {"hit": 5})
    assert code_in(folder) == code
    assert losses[1] < losses[0]


def code_in(folder):
    """The files of machine code, those of Triton's kernels too."""
    return {path for path in folder.rglob("*") if path.suffix in {".cubin", ".so"}}


@pytest.mark.long
def test_a_second_start_compiles_nothing(tmp_path):
    """Blocks at each level, in FP8, on request, and a loss without logits."""
    compiles_once(tmp_path)


class Scaled(nn.Module):
    """A parameter times what `scale` makes of the input."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(DIM))

    def forward(self, x):
        return self.weight * scale(x)


FACTORS = [1.0]  # by which `scale` multiplies: another one stands for an edit of the function


@torch._dynamo.allow_in_graph
def scale(x):
    """A function that stands in graphs by its name."""
    return x * FACTORS[0]


def edited(folder):
    """Compile a block, and again after an edit of what it calls."""
    use(folder)
    for level in (Level.NOTHING, Level.BLOCK):
        for factor in (2.0, 3.0):
            torch._dynamo.reset()
            FACTORS[0] = factor
            block = bmt.Block(Scaled(), use_checkpoint=level)
            out = block(torch.ones(2, DIM, requires_grad=True))
            out.sum().backward()
            assert out.eq(factor).all(), f"{level}: the function before the edit, or none"


@pytest.mark.long
def test_an_edited_function_is_compiled_again(tmp_path):
    """A function that is no operator, in the graph of a block or in its recomputed region."""
    run_ranks(edited, 1, str(tmp_path), init=BY_DEFAULT, timeout=120)


def with_sources(folder):
    """Compile a block, twice with the same sources and once with others."""
    use(folder)
    miss = NOTHING | {"miss": 1, "compiled": 2}
    for sources, expected in (("a", miss), ("a", NOTHING | {"hit": 1}), ("b", miss)):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        cache.sources = lambda found=sources: found  # type: ignore[assignment]
        block = bmt.Block(nn.LayerNorm(DIM), use_checkpoint=True)
        block(torch.ones(2, DIM, requires_grad=True)).sum().backward()
        assert counts() == expected


@pytest.mark.long
def test_other_sources_are_compiled_again(tmp_path):
    """What another version of this library has compiled is not used, even of the same graph."""
    run_ranks(with_sources, 1, str(tmp_path), init=BY_DEFAULT, timeout=120)


def test_the_hash_is_of_every_source_file(tmp_path, monkeypatch):
    """It is another one for another text, and for another name."""
    found = set()
    for name, text in (("a", "x"), ("a", "y"), ("b", "y")):
        folder = tmp_path / str(len(found))
        (folder / "compile").mkdir(parents=True)
        (folder / "kernels").mkdir()
        (folder / "kernels" / f"{name}.py").write_text(text)
        monkeypatch.setattr(cache, "__file__", str(folder / "compile" / "cache.py"))
        cache.sources.cache_clear()
        found.add(cache.sources())
    cache.sources.cache_clear()
    assert len(found) == 3
