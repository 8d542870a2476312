"""Parameters written between gathers, with a rank that comes late: the next gather has what every
rank wrote.
"""

from __future__ import annotations

import pathlib
import time
from typing import Any

import pytest
import torch
from tests.ranks.runner import run_ranks
from tests.tensors import own_slice, sharded_parameter

import bmtrain as bmt
from bmtrain.errors import ParameterError, StaleParameterError

DIM = 256
TRANSPORTS = [{"transport": "collective"}, {"transport": "copy_engine"}]


def come_late() -> None:
    if bmt.rank() == 1:
        time.sleep(0.1)


def make(num: int, level: int = 3, bias: bool = True) -> list[Any]:
    return [bmt.Block(torch.nn.Linear(DIM, DIM, bias=bias), zero_level=level) for _ in range(num)]


def set_and_gather(level: int) -> list[tuple[int, int]]:
    """Block by block, three times over: by then the order of gathers is known, and the next one is
    begun early.
    """
    wrong = []
    blocks = make(4, level, bias=False)
    for turn in range(3):
        for number, block in enumerate(blocks):
            (param,) = block.parameters()
            value = float(10 * turn + number + 1)
            come_late()
            param.set_full(torch.full((DIM, DIM), value))
            with torch.no_grad():
                if not bool((param.gather() == value).all()):
                    wrong.append((turn, number))
    return wrong


@pytest.mark.parametrize("level", [2, 3])
@pytest.mark.parametrize("init", TRANSPORTS)
def test_values_set_one_by_one(init: dict[str, Any], level: int) -> None:
    assert run_ranks(set_and_gather, 2, level, init=init) == [[], []]


def load_after_another_has_run(build_late: bool) -> list[float]:
    first, second = make(3), [] if build_late else make(3)
    x = torch.ones(2, DIM)
    with torch.no_grad():
        for block in first:
            block(x)
        second = second or make(3)
        come_late()
        for block in second:
            block.load_state_dict({"weight": torch.ones(DIM, DIM), "bias": torch.ones(DIM)})
        return [float(block(x).mean()) for block in second]


@pytest.mark.parametrize("build_late", [False, True])
@pytest.mark.parametrize("init", TRANSPORTS)
def test_a_model_loaded_after_another_has_run(init: dict[str, Any], build_late: bool) -> None:
    assert run_ranks(load_after_another_has_run, 2, build_late, init=init) == [[DIM + 1.0] * 3] * 2


def follow_the_student(level: int) -> list[float]:
    """A teacher is written after the student's forward pass and before its own, as with momentum
    encoders.
    """
    student, teacher, found = make(3, level), make(3, level), []
    x = torch.ones(2, DIM)
    for step in range(1, 4):
        y = x
        for block in student:
            y = block(y)
        come_late()
        with torch.no_grad():
            for block in teacher:
                for param in block.parameters():
                    param.fill_(step)
            found += [float(block(x).mean()) / step for block in teacher]
        y.sum().backward()
    return found


@pytest.mark.parametrize("level", [2, 3])
@pytest.mark.parametrize("init", TRANSPORTS)
def test_a_teacher_that_follows_its_student(init: dict[str, Any], level: int) -> None:
    assert run_ranks(follow_the_student, 2, level, init=init) == [[DIM + 1.0] * 9] * 2


def write_between(how: str, folder: pathlib.Path, level: int) -> list[float]:
    """One model runs, another gets values, and that runs: from the second turn on the first gather
    of the second is begun early.
    """
    first, second = make(2, level), torch.nn.ModuleList(make(2, level))
    x, found = torch.ones(2, DIM), []
    for turn in range(1, 4):
        values = {name: torch.full(shape, float(turn)) for name, shape in SHAPES.items()}
        if bmt.rank() == 0:
            torch.save(values, folder / f"{turn}.pt")
        bmt.synchronize()
        with torch.no_grad():
            for block in first:
                block(x)
            come_late()
            if how == "load":
                bmt.load(second, folder / f"{turn}.pt")
            elif how == "load_state_dict":
                second.load_state_dict(values)
            else:
                for param in second.parameters():
                    param.fill_(turn)
            found += [float(block(x).mean()) / turn for block in second]
    return found


SHAPES = {
    f"{block}.{name}": shape
    for block in (0, 1)
    for name, shape in (("weight", (DIM, DIM)), ("bias", (DIM,)))
}


@pytest.mark.parametrize("level", [2, 3])
@pytest.mark.parametrize("how", ["load", "load_state_dict", "fill_"])
def test_values_written_between_two_models(how: str, level: int, tmp_path: pathlib.Path) -> None:
    """Those of a gather that has begun before they were written are old ones."""
    for init in TRANSPORTS:
        assert run_ranks(write_between, 2, how, tmp_path, level, init=init) == [[DIM + 1.0] * 6] * 2


def write_slices_behind_a_gather(level: int) -> None:
    """What goes past the parameter is seen by version."""
    first, second = make(2, level), torch.nn.ModuleList(make(2, level))
    x = torch.ones(2, DIM)
    with torch.no_grad():
        for _ in range(2):
            for block in (*first, *second):
                block(x)
        for block in first:
            block(x)
        for param in second.parameters():
            own_slice(param).fill_(3.0)
        for block in second:
            block(x)


@pytest.mark.parametrize("level", [2, 3])
def test_values_written_behind_a_gather_that_has_begun(level: int) -> None:
    """They would be old ones.

    No rank may begin a gather that others do not, so the program is told.
    """
    with pytest.raises(StaleParameterError, match="after their gather had begun"):
        run_ranks(write_slices_behind_a_gather, 2, level)


def replace_data() -> None:
    block = make(1)[0]
    wrapped = bmt.BMTrainModelWrapper(torch.nn.Sequential(torch.nn.Linear(DIM, DIM)))
    for model in (block, wrapped):
        for param in model.parameters():
            before = param.data.clone()
            kept = param.data
            param.data = torch.full_like(param, 2.0)  # as programs do that swap in moving averages
            assert bool((param == 2.0).all()) and torch.equal(kept, before)
            param.data = kept
            assert torch.equal(param.data, before)
            kept.mul_(2.0)
            assert torch.equal(param.data, 2 * before)
            for wrong in (torch.ones(3), torch.ones(param.shape, dtype=torch.float64)):
                with pytest.raises(ParameterError):
                    param.data = wrong
            param.data.fill_(3.0)
            assert bool((param == 3.0).all())


def test_replacing_the_data_of_a_parameter() -> None:
    run_ranks(replace_data, 2)


def look_into_a_stage() -> float:
    embed, head = make(2)
    stages = bmt.PipelineTransformerBlockList(make(2))
    x = torch.ones(4, DIM)
    with torch.no_grad():
        y = embed(x)
        sharded_parameter(next(iter(stages.parameters()))).storage_of.gather()
        z = embed(head(y))
    return float(z.sum())


def test_looking_at_a_pipelined_parameter_between_gathers_of_all_ranks() -> None:
    first, *others = run_ranks(
        look_into_a_stage, 4, init={"transport": "copy_engine", "pipe_size": 2}, timeout=30
    )
    assert others == [first] * 3
