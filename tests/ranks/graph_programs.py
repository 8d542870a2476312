"""Training programs that must not notice whether `bmtrain.cuda_graph` captures their forward and
backward pass.
"""

import warnings

import torch
import torch.distributed as dist
from torch import nn

import bmtrain as bmt

STEPS = 11


class Layer(nn.Module):
    """Attention and feed-forward part, (rows, 5, dim) to the same, of operations that give the same
    bits every time.
    """

    def __init__(self, dim):
        super().__init__()
        self.norm, self.query, self.value = (
            nn.LayerNorm(dim),
            nn.Linear(dim, dim),
            nn.Linear(dim, dim),
        )
        self.up, self.down = nn.Linear(dim, 11), nn.Linear(11, dim)

    def forward(self, x):
        h = self.norm(x)
        weights = (self.query(h) @ h.transpose(1, 2)).softmax(-1)
        x = x + weights @ self.value(h)
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Blocks, a sharded layer outside of them, and an ordinary parameter."""

    def __init__(self, level, recompute, compiled, dim):
        super().__init__()
        torch.manual_seed(3)
        blocks = [
            bmt.Block(Layer(dim), use_checkpoint=recompute, zero_level=level, compile=compiled)
            for _ in range(3)
        ]
        self.blocks = bmt.TransformerBlockList(blocks)
        self.head = bmt.BMTrainModelWrapper(nn.Sequential(nn.Linear(dim, 5)))
        self.scale = nn.Parameter(torch.ones(5, device=bmt.device()))

    def forward(self, x):
        return self.head(self.blocks(x)) * self.scale


class Run:
    """A model in training, whose forward and backward pass may be captured."""

    def __init__(self, capture, level=3, recompute=False, compiled=False, dim=8, **options):
        self.net, self.dim = Net(level, recompute, compiled, dim), dim
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
        self.scheduler = bmt.lr_scheduler.Linear(self.optimizer, 1e-2, 2, 20)
        self.manager = bmt.optim.OptimManager(**options)
        self.manager.add_optimizer(self.optimizer, self.scheduler)
        self.num_calls = 0
        graphed = bmt.cuda_graph if capture else lambda function: function
        self.step, self.look = graphed(self.forward_and_backward), graphed(self.forward)
        self.clearing, self.parts = graphed(self.clear_first), graphed(self.two_parts)
        self.holding = graphed(self.hold_back)

    def forward(self, x):
        self.num_calls += 1
        return self.net(x).sum()

    def forward_and_backward(self, x, reduces=True):
        self.num_calls += 1
        loss = self.net(x).square().mean()
        self.manager.backward(loss, reduce_gradients=reduces)
        return loss

    def hold_back(self, x):
        return self.forward_and_backward(x, False)

    def clear_first(self, x, each):
        (self.optimizer if each else self.manager).zero_grad()
        return self.forward_and_backward(x)

    def two_parts(self, x, y):
        """Two micro-batches that are reduced together, and a third pass for some layers only."""
        self.num_calls += 1
        first, second = self.net(x).square().mean(), self.net(y).abs().mean()
        self.manager.backward(first, reduce_gradients=False)
        self.manager.backward(second)
        third = self.net.blocks[0](self.net.blocks[0](x)).square().mean()
        self.manager.backward(third)
        return first + second.detach() + third

    def rows(self, step, count=4):
        """Inputs of this rank, other ones for each step: (count, 5, dim)."""
        generator = torch.Generator().manual_seed(100 * step + bmt.rank())
        return torch.randn(count, 5, self.dim, generator=generator).to(bmt.device())

    def update(self, clears=True, set_to_none=True):
        self.manager.clip_grad_norm(self.optimizer.param_groups, 0.5)
        self.manager.step()
        if clears:
            self.manager.zero_grad(set_to_none=set_to_none)

    def state(self):
        return {name: value.clone() for name, value in self.net.state_dict().items()}


def plainly(run, step):
    loss = run.step(run.rows(step))
    run.update()
    return loss


def accumulating(run, step):
    """From zeros at times."""
    losses = [run.step(run.rows(10 * step + part)) for part in range(3)]
    run.update(set_to_none=step % 3 > 0)
    return torch.stack(losses)


def alternating(run, step):
    """In shapes, and with evaluation."""
    run.net.eval()
    with torch.no_grad():
        before = run.net(run.rows(step)).sum()
    run.net.train()
    loss = run.step(run.rows(step, 4 + step % 2))
    run.update()
    return before + loss


def changing_gradients(run, step):
    loss = run.step(run.rows(step))
    for param in run.net.parameters():
        if param.grad is not None and step % 3 == 1:
            param.grad = param.grad * 0.5
    run.update(step % 2 == 1)
    return loss


def partly_cleared(run, step):
    loss = run.step(run.rows(step))
    run.update(False)
    for number, param in enumerate(run.net.parameters()):
        param.grad = None if number % 2 else param.grad
    return loss


def freezing(run, step):
    """And loading."""
    if step in (4, 8):
        for param in [run.net.scale, *run.net.blocks[1].parameters()]:
            param.requires_grad_(step == 8)
    loss = plainly(run, step)
    if step == 6:
        run.net.load_state_dict({name: value * 0.9 for name, value in run.state().items()})
    return loss


def evaluating_captured(run, step):
    with torch.no_grad():
        before = run.look(run.rows(step))
    loss = run.forward_and_backward(run.rows(step))
    run.update()
    return before + loss.detach()


def clearing_inside(run, step):
    """By the manager and by the optimizer."""
    loss = run.clearing(run.rows(step), step > 5)
    run.update(False)
    return loss


def in_parts(run, step):
    loss = run.parts(run.rows(step), run.rows(step + 50))
    run.update(step % 2 == 1)
    return loss


def held_back(run, step):
    losses = [run.holding(run.rows(10 * step + part)) for part in range(2)]
    if step % 3:
        losses.append(run.step(run.rows(10 * step + 2)))
    run.update(step != 6)
    return torch.stack(losses)


def dropping_held_back(run, step):
    run.holding(run.rows(step))
    run.net.blocks[0].down.weight.grad = None
    return plainly(run, step)


def tied_and_hooked(run, step):
    if step == 0:
        run.net.blocks[2].up.weight = run.net.blocks[0].up.weight
        first, second, *_ = run.net.blocks[1].parameters()
        first.register_hook(lambda grad: grad * 0.5)
        second.register_post_accumulate_grad_hook(lambda param: param.grad.mul_(2.0))
    loss = run.step(run.rows(step))
    run.update(step % 2 == 1)
    return loss


PROGRAMS = (
    plainly,
    accumulating,
    alternating,
    changing_gradients,
    partly_cleared,
    freezing,
    evaluating_captured,
    clearing_inside,
    in_parts,
    held_back,
    dropping_held_back,
    tied_and_hooked,
)


def train(capture, program, *args, **options):
    """Losses, weights afterwards, and the run."""
    run = Run(capture, *args, **options)
    losses = [program(run, step) for step in range(STEPS)]
    return losses, run.state(), run


def compare(program, *args, **options):
    """Train with and without capture: the same bits."""
    what = f"{program.__name__} {args} {options}, {bmt.world_size()} ranks"
    want_losses, want, eager = train(False, program, *args, **options)
    got_losses, got, run = train(True, program, *args, **options)
    assert run.num_calls < eager.num_calls, f"{what}: the function ran in every step"
    for step, (mine, theirs) in enumerate(zip(got_losses, want_losses, strict=True)):
        assert torch.equal(mine, theirs), f"{what}: loss of step {step}: {mine} instead of {theirs}"
    for name, value in want.items():
        assert torch.equal(got[name], value), f"{what}: {name}"
    return run


def warned(do):
    """What `do` warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        do()
    return [str(warning.message) for warning in caught]


class Talking:
    """A block and an ordinary parameter; the function that may be captured does `inside`."""

    def __init__(self, inside):
        torch.manual_seed(1)
        self.block = bmt.Block(nn.Linear(3, 4), use_checkpoint=False)
        self.scale = nn.Parameter(torch.ones(4, device=bmt.device()))
        self.optimizer = torch.optim.SGD([*self.block.parameters(), self.scale], lr=0.1)
        self.manager = bmt.optim.OptimManager()
        self.manager.add_optimizer(self.optimizer)
        self.inside = inside

    def run(self, x):
        loss = self.inside(self, x)
        self.manager.backward(loss)
        return loss

    def loss(self, x):
        return (self.block(x) * self.scale).square().sum()


def reduces(talking, x):
    return bmt.distributed.all_reduce(talking.loss(x), "avg")


def sums_loss(talking, x):
    loss = talking.loss(x)
    return loss * bmt.sum_loss(loss).detach().cos()


def calls_torch(talking, x):
    loss = talking.loss(x)
    whole = loss.detach().clone()
    dist.all_reduce(whole)
    return loss * whole.cos()


def takes_norm(talking, x):
    return talking.loss(x) + talking.block.weight.norm()


def writes(talking, x):
    talking.block.weight.data.mul_(0.5)
    return talking.loss(x)


def writes_whole(talking, x):
    with torch.no_grad():
        first = talking.loss(x)
        talking.block.weight.set_full(torch.full((4, 3), 0.5, device=bmt.device()))
    return first + talking.loss(x)


def steps(talking, x):
    loss = talking.loss(x)
    loss.backward(retain_graph=True)
    talking.optimizer.step()
    return talking.loss(x)


def reads_ordinary(talking, x):
    loss = talking.loss(x)
    loss.backward(retain_graph=True)
    with torch.no_grad():
        talking.scale.sub_(torch.as_tensor(talking.scale.grad) * 0.1)
    return talking.loss(x)


def takes_gradient(talking, x):
    loss = talking.loss(x)
    (grad,) = torch.autograd.grad(loss, [talking.scale], retain_graph=True)
    return loss + grad.square().sum()


TOGETHER = (
    reduces,
    sums_loss,
    calls_torch,
    takes_norm,
    writes,
    writes_whole,
    steps,
    reads_ordinary,
    takes_gradient,
)


def refuse_together():
    """Each of TOGETHER computes what it does without a graph, after one warning."""
    for inside in TOGETHER:
        name = inside.__name__
        talking, plain = Talking(inside), Talking(inside)
        step = bmt.cuda_graph(talking.run)
        messages = []
        for number in range(6):
            x = torch.linspace(-1, 1, 3 * (2 + number % 2), device=bmt.device()).view(-1, 3)
            rows = x + bmt.rank()
            losses = []
            messages += warned(lambda: losses.append(step(rows)))  # noqa: B023
            assert torch.equal(losses[0], plain.run(rows).detach()), f"{name}: loss {number}"
            for each in (talking, plain):
                each.manager.step()
                each.manager.zero_grad()
        assert len(messages) == 1, (name, messages)
        for mine, theirs in zip(
            talking.optimizer.param_groups[0]["params"],
            plain.optimizer.param_groups[0]["params"],
            strict=True,
        ):
            assert torch.equal(mine.detach() + 0, theirs.detach() + 0), name
