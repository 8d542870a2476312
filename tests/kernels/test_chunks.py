"""Tables of tensors for one launch."""

import torch

from bmtrain.kernels.chunks import ALIGNMENT, Batch


def tables(*columns, length=16):
    return [table for _, table in Batch(zip(*columns, strict=True)).tables(length)]


def test_what_is_aligned_is_apart():
    """The widest loads are for rows of which every address and the length allow them; an odd end is cut
    off.
    """
    columns = torch.zeros(400), torch.zeros(400, dtype=torch.float16)
    bounds = [(0, 64), (64, 131), (131, 200), (208, 211), (224, 224)]
    parts = [[x[begin:end] for begin, end in bounds] for x in columns]
    aligned, rest = tables(*parts, length=64)

    def rows(places):
        return [[*(x[begin:].data_ptr() for x in columns), n] for begin, n in places.items()]

    assert aligned.is_aligned and not rest.is_aligned
    assert aligned.rows[:, :3].tolist() == rows({0: 64, 64: 64})
    assert rest.rows[:, :3].tolist() == rows({128: 3, 131: 69, 208: 3})
    assert not (aligned.rows[:, :3] % ALIGNMENT).any()


def test_a_table_is_made_once_for_the_same_places():
    """And anew when something lies elsewhere or has another length."""
    tensors = [torch.zeros(64) for _ in range(3)]
    (first,), (again,), (moved,), (longer,), (shorter,) = (
        tables(columns, length=length)
        for columns, length in (
            (tensors, 16),
            ([x.view(8, 8).view(-1) for x in tensors], 16),
            ([*tensors[:2], torch.ones(64)], 16),
            (tensors, 32),
            ([x[:48] for x in tensors], 16),
        )
    )
    assert again is first
    assert len({id(table) for table in (first, moved, longer, shorter)}) == 4
    assert moved.row_of is first.row_of, "which does not depend on the places"
    assert shorter.count == 9


def test_a_batch_has_tables_by_dtypes_and_makes_them_once():
    """Rows of other dtypes are other kernels' work. None takes fp64 and strided tensors, or what is on
    the CPU.
    """
    half, single = torch.float16, torch.float32
    batch = Batch([(torch.zeros(64, dtype=one), torch.zeros(64)) for one in (half, single, half)])
    made = batch.tables(32)
    counts = [(kind, table.count) for kind, table in made]
    assert counts == [((half, single), 4), ((single, single), 2)]
    assert batch.tables(32) is made and batch.tables(64) is not made
    assert Batch([]).tables(32) == []
    with torch.device("meta"):  # any device that is not the CPU
        fast = [torch.empty(3, 4), torch.empty(0, dtype=half)]
        slow = [torch.empty(3, 4).t(), torch.empty(3, dtype=torch.float64)]
    slow.append(torch.empty(2))
    for half_of, tensors in zip(
        Batch([(x,) for x in slow + fast]).by_path, (fast, slow), strict=True
    ):
        assert all(x is y for (x,), y in zip(half_of.rows, tensors, strict=True))
