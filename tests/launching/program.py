"""A program for launchers: trains a small model on all ranks, compares with one process, says where
it was.

    torchrun --nproc_per_node=2 -m tests.launching.program
"""

import json

import torch

import bmtrain as bmt
from bmtrain.runtime import world

STEPS = 3


def model():
    torch.manual_seed(5)
    return torch.nn.Sequential(*[torch.nn.Linear(6, 6) for _ in range(3)])


def rows(step, rank):
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def in_one_process(ranks):
    """Gradients of the first step and parameters after the last, by plain torch."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    first = []
    for step in range(STEPS):
        optimizer.zero_grad()
        sum(net(rows(step, rank)).square().sum() for rank in range(ranks)).backward()
        for param in net.parameters():
            assert param.grad is not None
            param.grad /= ranks
        first = first or [
            param.grad.clone() for param in net.parameters() if param.grad is not None
        ]
        optimizer.step()
    return first, [param.detach() for param in net.parameters()]


def sharded():
    """The same on this run's ranks."""
    net = torch.nn.Sequential(*[bmt.Block(layer) for layer in model()])
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    manager = bmt.optim.OptimManager(loss_scale=None)
    manager.add_optimizer(optimizer)
    first = []
    for step in range(STEPS):
        manager.zero_grad()
        manager.backward(net(rows(step, bmt.rank())).square().sum())
        first = first or [
            bmt.gather_result(param.grad).clone()
            for param in net.parameters()
            if param.grad is not None
        ]
        manager.step()
    return first, [bmt.gather_result(param.detach()).clone() for param in net.parameters()]


def compare_with_one_process():
    for found, expected in zip(sharded(), in_one_process(bmt.world_size()), strict=True):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def main():
    """Print rank, size, local rank and local size, after the comparison."""
    bmt.init_distributed(device="cpu", timeout=60)
    compare_with_one_process()
    current = world.current()
    place = [current.rank, current.world_size, current.local_rank, current.local_size]
    # Ranks that share a pipe write whole lines: shorter than it, in one call.
    print(f"PLACE {json.dumps(place)}\n", end="", flush=True)


if __name__ == "__main__":
    main()
