"""What `inspect` does without processes: tables, folded names, the order of records, and the arithmetic
of one tensor.
"""

import io
import math
from typing import Any

import pytest
import torch
from torch import nn

import bmtrain as bmt
from bmtrain.errors import ConfigurationError, NotInitializedError
from bmtrain.inspect import statistics as of_tensors
from bmtrain.inspect.tensors import Key, full_name, numbered

CPU = torch.device("cpu")
ROW = {"name": "layers.0.weight", "shape": (3, 4), "max": 1.23456, "min": -2.0}
ROW |= {"std": 0.5, "mean": 1e-7, "grad_std": None, "grad_mean": math.nan}


def test_the_table_shows_every_column():
    """A heading, a line per tensor, equal widths, four digits, a dash for what does not exist."""
    lines = bmt.inspect.format_summary([ROW, {**ROW, "name": "b"}]).splitlines()
    assert lines[0].split() == list(ROW)
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
    assert bmt.inspect.format_summary([]) == bmt.inspect.format_summary(iter([]))
    assert "grad_mean" in bmt.inspect.format_summary([])
    wrong: Any
    for wrong in (None, 3, "text", ROW, [3], [{"shape": ()}]):  # a dict alone is the likely slip
        with pytest.raises(ConfigurationError, match=r"format_summary got .*expected the"):
            bmt.inspect.format_summary(wrong)


def test_records_are_numbered_over_stages():
    """By segment, then stage, then as recorded; each name and group by itself."""

    def key(segment, stage, count=0, group="g"):
        return Key(group, "h", segment=segment, stage=stage, count=count)

    after = key(2, 0)
    there = [key(1, 0), key(1, 0, 1), key(1, 0, group=None)]
    found = numbered([key(0, 0), key(1, 1), after, *there, after])
    names = [full_name(key.name, key.group, index) for key, index in found.items()]
    assert names == ["g.0.h", "g.1.h", "g.2.h", "0.h", "g.3.h", "g.4.h"]
    assert [key.stage for key in found] == [0, 0, 0, 0, 1, 0]


def statistics(x):
    """By the function under test."""
    (found,) = of_tensors.combined(of_tensors.row_of(x)[None, None])
    return found


@pytest.mark.parametrize("chunk", [1 << 22, 7])
def test_statistics_are_those_of_torch(chunk, monkeypatch):
    """In fp64, in chunks of any size, of strided, sparse and 0-dim tensors."""
    monkeypatch.setattr(of_tensors, "CHUNK", chunk)
    drawn = torch.randn(5, 9, generator=torch.Generator().manual_seed(1)) * 3
    names = ("mean", "std", "max", "min")
    for name in ["float64", "float32", "bfloat16", "float16", "int64", "bool"]:
        x = drawn.to(getattr(torch, name))
        for y in (x, x.T, x[:, ::2], x.to_sparse() if x.is_floating_point() else x, x[:1, :2]):
            exact = (y.to_dense() if y.is_sparse else y).double()
            expected = {name: getattr(exact, name)().item() for name in names}
            assert statistics(y) == pytest.approx(expected, rel=1e-12)
        one = x[0, 0].item()
        found = statistics(x[0, 0])
        assert math.isnan(found.pop("std") or 0) and found == dict.fromkeys(found, one)
    # a small spread around a large mean, where the difference of mean squares would give noise
    x = drawn.double() * 1e-3 + 1e9
    assert statistics(x)["std"] == pytest.approx(x.std().item(), rel=1e-9)


def test_numbers_that_are_none():
    """Empty, complex and meta tensors have none; NaN is in everything; infinities as torch has them."""
    complex_, meta = torch.ones(2, dtype=torch.complex64), torch.ones(2, device="meta")
    for x in (torch.ones(0, 3), complex_, meta, None):
        assert set(statistics(x).values()) == {None}
    assert all(map(math.isnan, statistics(torch.tensor([1.0, math.nan, 3.0])).values()))
    values = statistics(torch.tensor([1.0, math.inf, 3.0]))
    assert (values["max"], values["min"], values["mean"]) == (math.inf, 1.0, math.inf)
    assert math.isnan(values["std"])
    values = statistics(torch.tensor([-math.inf, -1.0]))
    assert (values["max"], values["min"]) == (-1.0, -math.inf)


def test_plain_models_have_a_table_too():
    """Before `init_distributed`, of a module that is not sharded; recording is silent, looking is an
    error.
    """
    model = nn.Sequential(
        nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 5).half().requires_grad_(False)
    )
    out = io.StringIO()
    bmt.inspect.print_inspect(model, file=out)
    assert (
        out.getvalue()
        == """\
parameter  count x shape    dtype  elements  on rank 0  sharded  trainable  group
*.weight      2 x (3, 3)  float32        18         18    False       True      -
*.bias          2 x (3,)  float32         6          6    False       True      -
*.weight      1 x (5, 3)  float16        15         15    False      False      -
*.bias          1 x (5,)  float16         5          5    False      False      -
6 parameters of 44 elements, 24 trainable; 44 on rank 0
"""
    )
    for name, last in (("nothing", "0 parameters"), ("*.bias", "3 "), ("[2].weight", "1 ")):
        out = io.StringIO()
        bmt.inspect.print_inspect(model, name, file=out)
        assert out.getvalue().splitlines()[-1].startswith(last)
    bmt.inspect.record_tensor(torch.ones(2), "x")
    with pytest.raises(NotInitializedError, match="inspect_model needs"):
        bmt.inspect.inspect_model(model, "*")
    with pytest.raises(NotInitializedError, match="inspect_tensor needs"):
        bmt.inspect.inspect_tensor().__enter__()


def test_wrong_arguments_of_the_tables():
    """Named with what was expected."""
    calls = bmt.inspect
    for words, call, *given in (
        (r"print_inspect got int: expected a torch\.nn\.Module", calls.print_inspect, 3),
        ("print_inspect got 3 as param_name: expected a string", calls.print_inspect, CHAIN, 3),
    ):
        with pytest.raises(ConfigurationError, match=words):
            call(*given)


CHAIN = nn.Linear(1, 1)
