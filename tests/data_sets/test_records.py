"""Records as bytes: what comes back, what is refused, what damage does."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from tests.data_sets.common import refused

from model_center.dataset import records
from model_center.errors import DataError

PLAIN: list[Any] = [
    *(None, True, False, 0, -1, 2**63 - 1, -(2**63), 2**63, -(10**40), 0.1, float("inf")),
    *("", "naïve 漢字 🙂 \ud83d", b"", b"\0\x1f\xff", [], (), {}),
    {"a": [1, (2.5, None)], 3: {"b": b"x"}, None: ()},
]
ARRAYS: list[np.ndarray[Any, Any]] = [
    np.arange(6, dtype=np.int32).reshape(2, 3),
    np.zeros((0, 4), np.uint16),
    np.array(1.5),
    np.array([True, False]),
    np.array(["ab", "c"]),
    np.arange(4, dtype=">i2"),
    np.arange(12).reshape(3, 4)[:, ::2],
]
DTYPES = [
    *(torch.bool, torch.uint8, torch.int16, torch.int64, torch.float16, torch.bfloat16),
    *(torch.float32, torch.complex64),
]


def again(value):
    return records.loads(records.dumps(value))


@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_plain_values_come_back(value):
    """Equal and of the same type."""
    assert again(value) == value
    assert type(again(value)) is type(value)


def test_arrays_and_numbers_of_numpy_come_back():
    """Values, shape, dtype (in little-endian order), and they can be written to; plain numbers."""
    for array in ARRAYS:
        (back,) = again([array])
        np.testing.assert_array_equal(back, array)
        assert back.dtype == array.dtype.newbyteorder("<")
        assert back.shape == array.shape
        back.fill(back.dtype.type(0))
    assert again([np.int64(3), np.float32(0.5), np.bool_(True)]) == [3, 0.5, True]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_come_back(dtype):
    """Bit for bit, transposed ones and parameters too."""
    for shape in ((), (3,), (2, 0), (2, 3)):
        tensor = (torch.randn(shape) * 3).to(dtype)
        tensor = tensor.mT if tensor.dim() == 2 else tensor
        torch.testing.assert_close(again({"x": tensor})["x"], tensor, rtol=0, atol=0)
    parameter = torch.nn.Parameter(torch.ones(2))
    assert torch.equal(again(parameter), torch.ones(2))


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        ({"a": [1, {2}]}, r"cannot hold set \(at record\['a'\]\[1\]\)"),
        ([object()], r"cannot hold object \(at record\[0\]\)"),
        ({"f": len}, "builtin_function"),
        (np.array([object()]), "array of object"),
        (torch.ones(2).to_sparse(), "dense"),
        ({frozenset(): 1}, r"frozenset \(at record \(a key\)"),
    ],
)
def test_other_values_are_refused(value, complaint):
    """Saying where they are."""
    with refused(complaint):
        records.dumps(value)


def test_damage_is_an_error_and_nothing_else():
    """Any bytes give a value or a DataError: no other exception, no code run."""
    content = records.dumps({"a": [1, "text", np.arange(3), torch.ones(2)], "b": (None, 2**70)})
    for length in range(len(content)):
        with refused("damaged"):
            records.loads(content[:length])
    with refused("it ends after"):
        records.loads(content + b"N")
    draw = random.Random(0)
    for _ in range(3000):
        changed = bytearray(content)
        for _ in range(draw.randint(1, 4)):
            changed[draw.randrange(len(changed))] = draw.randrange(256)
        try:
            records.loads(bytes(changed))
        except DataError:
            continue
    with refused("damaged"):
        records.loads(b"l\1\0\0\0" * 100_000)
