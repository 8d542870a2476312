"""The orders of epochs; batches are those of test_loader.py."""

import itertools

from model_center.dataset.order import permutation


def test_orders_are_permutations_of_their_key():
    """Every number once; equal keys equal orders; other keys others; and the first order is this
    one for ever.
    """
    assert permutation(8, 0, 0).tolist() == [0, 3, 7, 5, 1, 2, 6, 4]
    for count in (0, 1, 2, 100):
        assert sorted(permutation(count, 1, -2).tolist()) == list(range(count))
    keys = list(itertools.product((0, 1, -1), (0, 1, 2)))
    assert len({tuple(permutation(100, *key).tolist()) for key in keys * 2}) == 9
