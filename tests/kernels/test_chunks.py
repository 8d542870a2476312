"""Tables of tensors for one launch."""

from __future__ import annotations

import torch

from bmtrain.kernels.chunks import ALIGNMENT, Batch, Chunks, chunks_of


def elements(chunks: Chunks, length: int, width: int = 4) -> list[int]:
    """Addresses in the first column of what the programs would work on, read from the table as a
    kernel does.
    """
    out = []
    for chunk, place in enumerate(chunks.row_of.tolist()):
        address, *_, numel, above = chunks.rows[place].tolist()
        first = (chunk - above) * length
        out += [address + width * i for i in range(first, min(first + length, numel))]
    return out


def test_every_element_belongs_to_one_program() -> None:
    """Whatever the lengths: 0, 1, below, at, above and at multiples of that of a chunk."""
    flat = torch.zeros(10_000)
    tensors = [part.clone() for part in flat.split([0, 1, 15, 16, 17, 32, 48, 1000, 0, 160, 8711])]
    tables = chunks_of([tensors], 16)
    got = [element for table in tables for element in elements(table, 16)]
    assert sorted(got) == sorted(x.data_ptr() + 4 * i for x in tensors for i in range(x.numel()))


def test_what_is_aligned_is_apart() -> None:
    """The widest loads are for rows of which every address and the length allow them; an odd end is
    cut off.
    """
    flat, half = torch.zeros(400), torch.zeros(400, dtype=torch.float16)
    bounds = [(0, 64), (64, 131), (131, 200), (208, 211), (224, 224)]
    aligned, rest = chunks_of([[x[begin:end] for begin, end in bounds] for x in (flat, half)], 64)
    assert aligned.is_aligned and not rest.is_aligned
    assert aligned.rows[:, :3].tolist() == [
        [flat[i:].data_ptr(), half[i:].data_ptr(), 64] for i in (0, 64)
    ]
    cut = [
        [flat[i:].data_ptr(), half[i:].data_ptr(), n] for i, n in ((128, 3), (131, 69), (208, 3))
    ]
    assert rest.rows[:, :3].tolist() == cut
    assert not (aligned.rows[:, :3] % ALIGNMENT).any()


def test_a_table_is_made_once_for_the_same_places() -> None:
    """And anew when something lies elsewhere or has another length."""
    tensors = [torch.zeros(64) for _ in range(3)]
    (first,) = chunks_of([tensors], 16)
    (again,) = chunks_of([[x.view(8, 8).view(-1) for x in tensors]], 16)
    assert again is first
    (moved,) = chunks_of([[*tensors[:2], torch.ones(64)]], 16)
    (longer,) = chunks_of([tensors], 32)
    (shorter,) = chunks_of([[x[:48] for x in tensors]], 16)
    assert len({id(table) for table in (first, moved, longer, shorter)}) == 4
    assert moved.row_of is first.row_of, "which does not depend on the places"
    assert shorter.count == 9


def test_nothing() -> None:
    assert chunks_of([[]], 16) == () and chunks_of([[torch.empty(0)], [torch.empty(0)]], 16) == ()


def test_what_no_kernel_takes() -> None:
    """fp64 and strided tensors, and all on the CPU."""
    meta = torch.device("meta")  # any device that is not the CPU
    fast = [torch.empty(3, 4, device=meta), torch.empty(0, device=meta, dtype=torch.float16)]
    slow = [
        torch.empty(3, 4, device=meta).t(),
        torch.empty(3, device=meta, dtype=torch.float64),
        torch.empty(2),
    ]
    got = Batch([(x,) for x in (*slow, *fast)]).by_path
    assert [[id(x) for (x,) in half.rows] for half in got] == [
        list(map(id, fast)),
        list(map(id, slow)),
    ]


def test_a_batch_has_tables_by_dtypes_and_makes_them_once() -> None:
    """Rows of other dtypes are other kernels' work."""
    rows = [
        (torch.zeros(64, dtype=one), torch.zeros(64))
        for one in (torch.float16, torch.float32, torch.float16)
    ]
    batch = Batch(rows)
    tables = batch.tables(32)
    assert [(kind, table.count) for kind, table in tables] == [
        ((torch.float16, torch.float32), 4),
        ((torch.float32, torch.float32), 2),
    ]
    assert batch.tables(32) is tables and batch.tables(64) is not tables
    assert Batch([]).tables(32) == []
