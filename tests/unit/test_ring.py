"""The ring of full buffers."""

from __future__ import annotations

import torch

from bmtrain.shard.residence import Ring, alias


def make(num_members: int) -> Ring:
    ring = Ring(16, torch.float32, torch.device("cpu"), capacity=3)
    for _ in range(num_members):
        ring.join()
    return ring


def test_the_least_recently_released_free_buffer_is_taken() -> None:
    """So that the values of the last users stay longest. When all are held one more is made, and
    dropped again when it comes back.
    """
    ring = make(9)
    a, b, c = (ring.take(object()) for _ in range(3))
    assert ring.num_buffers == 3
    for buffer in (b, a, c):
        ring.give_back(buffer, None)
    assert ring.take(object()) is b
    assert ring.take(object()) is a
    assert ring.num_buffers == 3
    taken = [a, b, *(ring.take(object()) for _ in range(2))]
    assert len({buffer.tensor.data_ptr() for buffer in taken}) == 4
    for buffer in taken:
        ring.give_back(buffer, None)
    assert ring.num_buffers == 3


def test_a_size_that_one_storage_has_keeps_nothing() -> None:
    """Its memory would serve nobody else."""
    ring = make(1)
    buffer = ring.take(object())
    assert ring.num_buffers == 1
    ring.give_back(buffer, None)
    assert ring.num_buffers == 0


def test_memory_goes_with_the_last_storage() -> None:
    """Not before: another rank may not have noticed yet that the others are gone, and all must keep the
    same buffers.
    """
    ring = make(3)
    for buffer in [ring.take(object()) for _ in range(3)][:2]:
        ring.give_back(buffer, None)
    ring.leave()
    ring.leave()
    assert ring.num_buffers == 3 and ring.num_kept == 3
    ring.leave()
    assert ring.num_buffers == 1, "what is held stays until it is given back"


def test_refilling_is_no_change_to_autograd() -> None:
    """An alias has a version of its own: a tensor saved from it stays usable in backward after the
    buffer was written. A run may begin with an evaluation.
    """
    with torch.inference_mode():
        buffer = make(2).take(object())
    assert not buffer.tensor.is_inference()
    memory, x = torch.ones(4), torch.ones(4, requires_grad=True)
    weight = alias(memory)
    y = (x * weight).sum()
    memory.fill_(2.0)
    y.backward()
    assert x.grad is not None and torch.equal(x.grad, torch.full((4,), 2.0))
    assert weight.data_ptr() == memory.data_ptr()
