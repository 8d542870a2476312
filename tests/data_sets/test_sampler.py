"""The arithmetic of batches and orders, tried on every small case."""

import itertools

from model_center.dataset.sampler import BatchSplit, RankBatches, permutation

CASES = [
    (rows, batch, ranks)
    for rows, batch, ranks in itertools.product(range(1, 41), (1, 2, 3, 5), (1, 2, 3, 4))
    if rows >= ranks
]


def batches(rows, cut, *, shuffle=True):
    """Per rank, the batches of an epoch."""
    out = []
    for rank in range(cut.world_size):
        sampler = RankBatches(rows, shuffle=shuffle, seed=7)
        sampler.start(cut, rank, 0, 0)
        out.append(list(sampler))
    return out


def flat(per_rank):
    """All rows in the order of the epoch: step by step, rank by rank."""
    return [row for step in zip(*per_rank, strict=True) for batch in step for row in batch]


def test_every_row_once_and_equally_many_batches():
    """Over all ranks each row once, in the order of the epoch; no batch is empty; len() is what
    comes; the work of a step is even.
    """
    for rows, batch_size, ranks in CASES:
        cut = BatchSplit(batch_size=batch_size, world_size=ranks)
        got = batches(rows, cut)
        assert flat(batches(rows, cut, shuffle=False)) == list(range(rows))
        assert flat(got) == permutation(rows, 7, 0).tolist()
        assert {len(of_rank) for of_rank in got} == {cut.count(rows)}
        sizes = [len(batch) for of_rank in got for batch in of_rank]
        assert 1 <= min(sizes) <= max(sizes) <= max(batch_size, 2)
        full = max((rows - ranks) // (batch_size * ranks) - 1, 0)
        assert all(len(batch) == batch_size for of_rank in got for batch in of_rank[:full])
        for step in zip(*got, strict=True):
            assert max(map(len, step)) - min(map(len, step)) <= 1
        whole = BatchSplit(batch_size=batch_size, world_size=ranks, drop_last=True)
        steps, full = zip(*batches(rows, whole, shuffle=False), strict=True), batch_size * ranks
        assert [sum(map(len, step)) for step in steps] == [full] * (rows // full)
        assert whole.count(rows) == rows // full


def test_orders_are_permutations_of_their_key():
    """Every number once; equal keys equal orders; other keys others; and the first order is this
    one for ever.
    """
    assert permutation(8, 0, 0).tolist() == [0, 3, 7, 5, 1, 2, 6, 4]
    for count in (0, 1, 2, 100):
        assert sorted(permutation(count, 1, -2).tolist()) == list(range(count))
    keys = list(itertools.product((0, 1, -1), (0, 1, 2)))
    assert len({tuple(permutation(100, *key).tolist()) for key in keys * 2}) == 9
