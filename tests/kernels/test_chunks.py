"""Tables of tensors for one launch."""

import torch

from bmtrain.kernels.chunks import ALIGNMENT, by_path, tables_of


def tables(tensors, length=16):
    return [table for _, table in tables_of(tensors, length)]


def test_what_is_aligned_is_apart():
    """The widest loads are for tensors of which address and length allow them; an odd end is cut off."""
    flat = torch.zeros(400, dtype=torch.float16)
    bounds = [(0, 64), (64, 131), (131, 200), (208, 211), (224, 224)]
    made = tables_of([flat[begin:end] for begin, end in bounds], 64)
    (is_first, aligned), (is_second, rest) = ((kind[1], table) for kind, table in made)

    def rows(places):
        return [[flat[begin:].data_ptr(), n] for begin, n in places.items()]

    assert is_first and not is_second
    assert aligned[0][:, :2].tolist() == rows({0: 64, 64: 64})
    assert rest[0][:, :2].tolist() == rows({128: 3, 131: 69, 208: 3})
    assert not (aligned[0][:, :2] % ALIGNMENT).any()


def test_a_table_is_made_once_for_the_same_places():
    """And anew when something lies elsewhere or has another length."""
    tensors = [torch.zeros(64) for _ in range(3)]
    (first,), (again,), (moved,), (longer,), (shorter,) = (
        tables(given, length=length)
        for given, length in (
            (tensors, 16),
            ([x.view(8, 8).view(-1) for x in tensors], 16),
            ([*tensors[:2], torch.ones(64)], 16),
            (tensors, 32),
            ([x[:48] for x in tensors], 16),
        )
    )
    assert again is first
    assert len({id(table) for table in (first, moved, longer, shorter)}) == 4
    assert moved[1] is first[1], "which does not depend on the places"
    assert len(shorter[1]) == 9


def test_tables_are_by_dtype_of_what_kernels_take():
    """Tensors of other dtypes are other kernels' work. None takes fp64 and strided tensors, or what is
    on the CPU.
    """
    half, single = torch.float16, torch.float32
    made = tables_of([torch.zeros(64, dtype=one) for one in (half, single, half)], 32)
    assert [(kind, len(row_of)) for kind, (_, row_of) in made] == [
        ((half, True), 4),
        ((single, True), 2),
    ]
    assert tables_of([], 32) == tables_of([torch.empty(0)], 32) == []
    with torch.device("meta"):  # any device that is not the CPU
        fast = [torch.empty(3, 4), torch.empty(0, dtype=half)]
        slow = [torch.empty(3, 4).t(), torch.empty(3, dtype=torch.float64)]
    slow.append(torch.empty(2))
    for found, tensors in zip(by_path(slow + fast), (fast, slow), strict=True):
        assert all(x is y for x, y in zip(found, tensors, strict=True))
