"""bmtrain.cuda_graph on a GPU: training with and without it gives the same bits."""

import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from tests.ranks import graph_programs
from tests.ranks.runner import run_ranks
from tests.tensors import grad_of, own_slice, sharded_parameter
from torch import nn

import bmtrain as bmt

pytestmark = pytest.mark.gpu


RANKS = min(2, torch.cuda.device_count())
# With few columns shards are small, and collectives carry them; with many, copies do.
SEVERAL = [
    (1, "auto", 8),
    *([(2, "auto", 8), (2, "auto", 256), (2, "collective", 8)] if RANKS > 1 else []),
]


def on_gpus(fn, *args, ranks=1, transport="auto"):
    """Run on so many GPUs."""
    # Else passes without the graph would run whole, and round otherwise.
    init = {"transport": transport, "compile": False}
    run_ranks(fn, ranks, *args, device=None, timeout=100, init=init)


def compare_programs(dim):
    for program in graph_programs.PROGRAMS:
        graph_programs.compare(program, dim=dim)


def compare_options(level, recompute, compiled):
    # Inductor warns of deprecated parts of torch itself
    warnings.filterwarnings("ignore", module=r"torch\.")
    graph_programs.compare(graph_programs.plainly, level, recompute, compiled)
    graph_programs.compare(graph_programs.accumulating, level, recompute, compiled)


def compare_scaled():
    run = graph_programs.compare(graph_programs.plainly, loss_scale=4.0, loss_scale_steps=2)
    assert run.manager.loss_scale > 16, "the scale grew while a graph was replayed"


@pytest.mark.parametrize(("ranks", "transport", "dim"), SEVERAL)
def test_every_way_of_training(ranks, transport, dim):
    """All programs of the CPU tests."""
    on_gpus(compare_programs, dim, ranks=ranks, transport=transport)


@pytest.mark.skipif(RANKS < 2, reason="one GPU communicates with nobody")
def test_what_ranks_do_together_is_never_captured():
    """Collectives inside, of torch's own too: one warning, and what the function computes."""
    on_gpus(graph_programs.refuse_together, ranks=2)


@pytest.mark.parametrize(
    ("level", "recompute", "compiled"),
    [(2, False, True), (2, True, False), (3, False, False), (3, True, True)],
)
def test_every_kind_of_block(level, recompute, compiled):
    """ZeRO-2 and ZeRO-3, recomputed or not, compiled or not."""
    on_gpus(compare_options, level, recompute, compiled, ranks=RANKS)


def test_a_loss_scale_that_changes():
    """The scale is read before each replay."""
    on_gpus(compare_scaled, ranks=RANKS)


class Dropped(nn.Module):
    """Dropout in front of a weight: its gradient tells the mask that backward has used."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((512,), 2.0))

    def forward(self, x):
        return torch.tanh(F.dropout(x, 0.5, self.training) * self.weight) * 1.0


def draw(recompute, compiled):
    warnings.filterwarnings("ignore", module=r"torch\.")
    blocks = [bmt.Block(Dropped(), use_checkpoint=recompute, compile=compiled) for _ in range(3)]
    manager = bmt.optim.OptimManager(grad_scale=1.0)
    manager.add_optimizer(
        torch.optim.SGD([param for block in blocks for param in block.parameters()], lr=0.0)
    )

    @bmt.cuda_graph
    def step(x):
        outs = [block(x) for block in blocks]
        manager.backward(sum(out.sum() for out in outs))
        return torch.stack(outs)

    def masks(x):
        manager.zero_grad()
        outs = step(x)
        for block, out in zip(blocks, outs, strict=True):
            slope = 2.0 * (1 - math.tanh(4.0) ** 2) * bmt.world_size()  # all ranks draw the same
            want = (out[0] != 0) * slope
            param = sharded_parameter(next(block.parameters()))
            piece = param.storage_of.piece(0)
            found = own_slice(grad_of(param))
            assert torch.allclose(found, want[piece.start : piece.stop], rtol=1e-2), (
                "backward used another mask"
            )
        return outs[:, 0] != 0

    x = torch.ones(1, 512, device=bmt.device())
    seen = [masks(x) for _ in range(7)]
    every = [mask for found in seen for mask in found]
    for number, mask in enumerate(every):
        assert 0.35 < mask.float().mean() < 0.65
        assert not any(torch.equal(mask, other) for other in every[:number]), (
            f"mask {number} was drawn before"
        )
    torch.manual_seed(5)
    first = [masks(x) for _ in range(2)]
    torch.manual_seed(5)
    for mine, again in zip(first, [masks(x) for _ in range(2)], strict=True):
        assert torch.equal(mine, again), "the seed decides"


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_dropout(recompute, compiled):
    """Every replay draws anew, backward sees what forward drew, recomputed too, and a seed repeats
    it all.
    """
    on_gpus(draw, recompute, compiled, ranks=RANKS)


class Failing:
    """A block in training; `inside` runs in the function that is captured."""

    def __init__(self, inside):
        torch.manual_seed(3)
        self.block = bmt.Block(
            nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5)), use_checkpoint=False, compile=False
        )
        self.manager = bmt.optim.OptimManager()
        self.manager.add_optimizer(torch.optim.SGD(self.block.parameters(), lr=0.1))
        self.inside = inside
        self.step = bmt.cuda_graph(self.run)

    def run(self, x):
        out = self.block(x)
        self.inside(out)
        loss = out.square().mean()
        self.manager.backward(loss)
        self.inside(loss)
        return loss

    def losses(self, count):
        out = []
        for number in range(count):
            torch.manual_seed(number)
            out.append(self.step(torch.ones(4, 64, device=bmt.device())).item())
            self.manager.step()
            self.manager.zero_grad()
        return out


def to_the_host(x):
    return x.sum().item()


def while_capturing(x):
    if torch.cuda.is_current_stream_capturing():
        raise KeyError("not now")


def synchronising(x):
    torch.cuda.synchronize()


def fail():
    want = Failing(lambda x: None)  # never captured
    want.step = want.run
    expected = want.losses(6)
    for inside in (to_the_host, while_capturing, synchronising):
        failing = Failing(inside)
        got = []
        messages = graph_programs.warned(lambda: got.extend(failing.losses(6)))  # noqa: B023
        assert len(messages) == 1, (inside.__name__, messages)
        assert "without a CUDA graph" in messages[0], messages
        assert got == expected, (inside.__name__, got, expected)
        again = Failing(lambda x: None)
        assert not graph_programs.warned(lambda: got.extend(again.losses(6)))  # noqa: B023
        assert got[6:] == expected, (inside.__name__, "a graph made afterwards")


def test_errors_inside_a_capture_leave_everything_usable():
    """A value read by the host, an exception, a synchronisation: one warning, the same losses, and
    graphs afterwards.
    """
    on_gpus(fail)


def count_memory():
    run = graph_programs.Run(True)
    used = []
    # three kinds of calls, each twice as they are, then captured, then replayed
    for number in range(18):
        run.step(run.rows(number, 4 + number % 3))
        run.update()
        run.manager.zero_grad()
        torch.cuda.synchronize()
        used.append(torch.cuda.memory_allocated())
    assert used[-1] == used[-4] == used[-7], used
    assert run.num_calls == 9, "it was not captured"


def test_replays_take_no_memory():
    """What is allocated stays as it is from replay to replay."""
    on_gpus(count_memory, ranks=RANKS)


def never_wait():
    warnings.filterwarnings("ignore", message=".*ynchronization debug mode.*")
    run = graph_programs.Run(True)
    x = run.rows(0)
    for number in range(8):
        if number == 5:
            torch.cuda.set_sync_debug_mode("error")
        run.step(x)
        run.manager.zero_grad()
    torch.cuda.set_sync_debug_mode("default")
    assert run.num_calls == 3, "it was not captured"


def test_replays_never_make_the_host_wait():
    """Nothing between two replays looks at the device."""
    on_gpus(never_wait, ranks=RANKS)
