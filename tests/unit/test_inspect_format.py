"""What `inspect` does without processes: tables, folded names, the order of records, and the
arithmetic of one tensor.
"""

from __future__ import annotations

import dataclasses
import io
import math

import pytest
import torch
from torch import nn

import bmtrain as bmt
from bmtrain.errors import ConfigurationError, NotInitializedError
from bmtrain.inspect import statistics as of_tensors
from bmtrain.inspect.tables import fold, ranges
from bmtrain.inspect.tensors import Key, in_order, number, shape_of_all

CPU = torch.device("cpu")
ROW = {
    "name": "layers.0.weight",
    "shape": (3, 4),
    "max": 1.23456,
    "min": -2.0,
    "std": 0.5,
    "mean": 1e-7,
    "grad_std": None,
    "grad_mean": math.nan,
}


def test_the_table_shows_every_column() -> None:
    """A heading, a line per tensor, equal widths, four digits, a dash for what does not exist."""
    lines = bmt.inspect.format_summary([ROW, {**ROW, "name": "b"}]).splitlines()
    assert lines[0].split() == [
        "name",
        "shape",
        "max",
        "min",
        "std",
        "mean",
        "grad_std",
        "grad_mean",
    ]
    assert lines[1].split() == [
        "layers.0.weight",
        "(3,",
        "4)",
        "1.235",
        "-2",
        "0.5",
        "1e-07",
        "-",
        "nan",
    ]
    assert lines[2].startswith("b  ")
    assert len({len(line) for line in lines}) == 1


def test_an_empty_table_is_its_heading() -> None:
    """For an empty list and an empty iterator."""
    assert bmt.inspect.format_summary([]) == bmt.inspect.format_summary(iter([])) != ""
    assert "grad_mean" in bmt.inspect.format_summary([])


@pytest.mark.parametrize("wrong", [None, 3, "text", ROW, [3], [{"shape": ()}]])
def test_what_is_no_summary(wrong: object) -> None:
    """A dict alone is the likely slip."""
    with pytest.raises(ConfigurationError, match=r"format_summary got .*expected the"):
        bmt.inspect.format_summary(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([0], "0"), ([0, 1, 2], "0-2"), ([4, 0, 1, 7, 8], "0-1,4,7-8"), ([10, 9, 2], "2,9-10")],
)
def test_ranges(numbers: list[int], text: str) -> None:
    """Sorted as numbers."""
    assert ranges(numbers) == text


def test_equal_layers_fold() -> None:
    """Layers of equal settings; two levels of numbers; settings that differ; names that differ in
    words.
    """
    names = [f"layers.{i}.experts.{j}.weight" for i in range(12) for j in range(3)]
    named = [
        ("embedding", 1),
        *((name, 2) for name in names),
        *((f"layers.{i}.bias", 4 + (i == 5)) for i in range(12)),
    ]
    folded = [(row.name, row.count, row.settings) for row in fold(named)]
    assert folded == [
        ("embedding", 1, 1),
        ("layers.[0-11].experts.[0-2].weight", 36, 2),
        ("layers.[0-4,6-11].bias", 11, 4),
        ("layers.5.bias", 1, 5),
    ]
    assert sum(count for _, count, _ in folded) == len(named)


def test_members_that_differ_inside_do_not_fold() -> None:
    """Layer 1 has one expert fewer: it stays a line of its own."""
    names = [f"l.{i}.e.{j}" for i, experts in enumerate((2, 1, 2)) for j in range(experts)]
    assert [row.name for row in fold((name, None) for name in names)] == [
        "l.[0,2].e.[0-1]",
        "l.1.e.0",
    ]
    assert fold([]) == []


def test_records_are_numbered_over_stages() -> None:
    """By segment, then stage, then as recorded; each name and group by itself."""
    here = [Key("g", "h", segment=0, stage=0, count=0), Key("g", "h", segment=1, stage=1, count=0)]
    there = [Key("g", "h", segment=1, stage=0, count=n) for n in range(2)] + [
        Key(None, "h", segment=1, stage=0, count=0)
    ]
    after = [Key("g", "h", segment=2, stage=0, count=0)]
    keys = in_order([*here, *after, *there, *after])
    assert [key.text(index) for key, index in number(keys).items()] == [
        "g.0.h",
        "g.1.h",
        "g.2.h",
        "0.h",
        "g.3.h",
        "g.4.h",
    ]
    assert [key.stage for key in keys] == [0, 0, 0, 0, 1, 0]


@pytest.mark.parametrize(
    ("shapes", "whole"),
    [
        ([(2, 3)], (2, 3)),
        ([(2, 3), (0, 3), (5, 3)], (7, 3)),
        ([(2, 3, 4), (2, 5, 4)], (4, -1, 4)),
        ([(), ()], (2,)),
        ([(), (3,)], (4,)),
        ([(2, 3), (2,)], (-1,)),
    ],
)
def test_shape_of_all_ranks(shapes: list[tuple[int, ...]], whole: tuple[int, ...]) -> None:
    """Rows add up; dims that differ are -1; a number is a row."""
    assert shape_of_all(shapes) == whole


def statistics(x: torch.Tensor) -> dict[str, float | None]:
    """By the functions under test."""
    (found,) = of_tensors.statistics_of(of_tensors.measure([x], CPU))
    assert found is not None
    return dataclasses.asdict(found)


@pytest.mark.parametrize("chunk", [1 << 22, 7])
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool]
)
def test_statistics_are_those_of_torch(
    dtype: torch.dtype, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In fp64, in chunks of any size, of strided, sparse and 0-dim tensors."""
    monkeypatch.setattr(of_tensors, "CHUNK", chunk)
    x = (torch.randn(5, 9, generator=torch.Generator().manual_seed(1)) * 3).to(dtype)
    for y in (x, x.T, x[:, ::2], x.to_sparse() if dtype.is_floating_point else x, x[:1, :2]):
        exact = y.to_dense().double() if y.is_sparse else y.double()
        expected = {
            "mean": exact.mean(),
            "std": exact.std(),
            "max": exact.max(),
            "min": exact.min(),
        }
        assert statistics(y) == pytest.approx(
            {name: value.item() for name, value in expected.items()}, rel=1e-12
        )
    assert statistics(x[0, 0]) == {
        "mean": x[0, 0].item(),
        "std": None,
        "max": x[0, 0].item(),
        "min": x[0, 0].item(),
    }


def test_nothing_cancels() -> None:
    """A small spread around a large mean, where the difference of mean squares would give noise."""
    x = (
        torch.randn(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) * 1e-3
        + 1e9
    )
    assert statistics(x)["std"] == pytest.approx(x.std().item(), rel=1e-9)


@pytest.mark.parametrize(
    "x", [torch.ones(0, 3), torch.ones(2, dtype=torch.complex64), torch.ones(2, device="meta")]
)
def test_no_numbers(x: torch.Tensor) -> None:
    """Empty, complex and meta tensors have none, and break nothing."""
    assert set(statistics(x).values()) == {None}
    assert of_tensors.statistics_of(of_tensors.measure([None], CPU)) == [None]


def test_bad_numbers_are_seen() -> None:
    """NaN in everything; infinities as torch has them."""
    values = statistics(torch.tensor([1.0, math.nan, 3.0]))
    assert all(value is not None and math.isnan(value) for value in values.values())
    values = statistics(torch.tensor([1.0, math.inf, 3.0]))
    assert (values["max"], values["min"], values["mean"]) == (math.inf, 1.0, math.inf)
    assert values["std"] is not None and math.isnan(values["std"])
    values = statistics(torch.tensor([-math.inf, -1.0]))
    assert (values["max"], values["min"]) == (-1.0, -math.inf)


def test_plain_models_have_a_table_too() -> None:
    """Before `init_distributed`, of a module that is not sharded."""
    model = nn.Sequential(
        nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 5).half().requires_grad_(False)
    )
    out = io.StringIO()
    rows = bmt.inspect.print_inspect(model, file=out)
    assert [
        (row.name, row.count, row.shape, row.num_local, row.sharded, row.trainable) for row in rows
    ] == [
        ("[0-1].weight", 2, (3, 3), 9, False, True),
        ("[0-1].bias", 2, (3,), 3, False, True),
        ("2.weight", 1, (5, 3), 15, False, False),
        ("2.bias", 1, (5,), 5, False, False),
    ]
    text = out.getvalue()
    assert "[0-1].weight" in text and "2 x (3, 3)" in text and "float16" in text
    assert "6 parameters of 44 elements, 24 trainable; 44 on rank 0" in text
    assert bmt.inspect.print_inspect(model, "nothing", file=out) == []
    for name, count in (("*.bias", 2), ("[2].weight", 1)):
        assert len(bmt.inspect.print_inspect(model, name, file=out)) == count


def test_wrong_arguments_of_the_tables() -> None:
    """Named with what was expected."""
    with pytest.raises(
        ConfigurationError, match=r"print_inspect got int: expected a torch\.nn\.Module"
    ):
        bmt.inspect.print_inspect(3)  # type: ignore[arg-type]
    with pytest.raises(
        ConfigurationError, match=r"print_inspect got 3 as pattern: expected a string"
    ):
        bmt.inspect.print_inspect(nn.Linear(1, 1), 3)  # type: ignore[arg-type]
    for wrong in (3, [3], nn.Linear(1, 1)):
        with pytest.raises(
            ConfigurationError, match=r"precision_report got (int|Linear).*manager\.optimizers"
        ):
            bmt.inspect.precision_report(nn.Linear(1, 1), wrong)  # type: ignore[arg-type]


def test_before_init() -> None:
    """Recording is silent, looking is an error."""
    bmt.inspect.record_tensor(torch.ones(2), "x")
    with pytest.raises(NotInitializedError, match="inspect_model needs"):
        bmt.inspect.inspect_model(nn.Linear(1, 1), "*")
    with (
        pytest.raises(NotInitializedError, match="inspect_tensor needs"),
        bmt.inspect.inspect_tensor(),
    ):
        pass
