"""Parameters written between gathers, with a rank that comes late: the next gather has what every
rank wrote.
"""

import time

import pytest
import torch
from tests.ranks import models
from tests.ranks.runner import on_ranks, run_ranks
from tests.tensors import own_slice, sharded_parameter

import bmtrain as bmt
from bmtrain.errors import ParameterError, StaleParameterError

DIM = 256


def come_late():
    if bmt.rank() == 1:
        time.sleep(0.05)


def make(num, level=3):
    blocks = [bmt.Block(torch.nn.Linear(DIM, DIM), zero_level=level) for _ in range(num)]
    return torch.nn.Sequential(*blocks)


def means(blocks):
    """What each block makes of ones: DIM + 1 times what all its parameters are."""
    for block in blocks:
        yield float(block(torch.ones(2, DIM)).mean()) / (DIM + 1)


def states(value):
    weight, bias = torch.full((DIM, DIM), value), torch.full((DIM,), value)
    return {f"{n}.{name}": x for n in (0, 1) for name, x in (("weight", weight), ("bias", bias))}


def set_one_by_one(level, folder):
    """Three times over: by then the order of gathers is known, and the next one is begun early."""
    blocks = make(4, level)
    for turn in range(3):
        for number, block in enumerate(blocks):
            param, value = block.weight, float(10 * turn + number + 1)
            come_late()
            param.set_full(torch.full((DIM, DIM), value))
            with torch.no_grad():
                assert bool((param.gather() == value).all())


def load_after_another_has_run(level, folder):
    first, x = make(3, level), torch.ones(2, DIM)
    with torch.no_grad():
        for second in (make(2, level), None):
            first(x)
            own = second or make(2, level)
            come_late()
            own.load_state_dict(states(1.0))
            assert [*means(own)] == [1.0] * 2


def follow_the_student(level, folder):
    """A teacher is written after the student's forward pass and before its own, as with momentum
    encoders.
    """
    student, teacher = make(3, level), make(3, level)
    for step in range(1, 4):
        y = student(torch.ones(2, DIM))
        come_late()
        with torch.no_grad():
            for param in teacher.parameters():
                param.fill_(step)
            assert [*means(teacher)] == [step] * 3
        y.sum().backward()


def write_between_two_models(level, folder):
    """From the second turn on the first gather of the second is begun early: those of a gather that
    has begun before they were written are old ones.
    """
    first, second = make(2, level), make(2, level)
    for turn in range(1, 10):
        if bmt.rank() == 0 and turn % 3 == 0:
            torch.save(states(turn), folder / f"{turn}.pt")
        bmt.synchronize()
        with torch.no_grad():
            list(means(first))
            come_late()
            if turn % 3 == 0:
                bmt.load(second, folder / f"{turn}.pt")
            elif turn % 3 == 1:
                second.load_state_dict(states(turn))
            else:
                for param in second.parameters():
                    param.fill_(turn)
            assert [*means(second)] == [turn] * 2


def write_slices_behind_a_gather(level, folder):
    """What goes past the parameter is seen by version, once its gather has begun: values would be
    old ones, and no rank may begin a gather that others do not, so the program is told.
    """
    first, second = make(2, level), make(2, level)
    with torch.no_grad():
        for _ in range(2):
            list(means((*first, *second)))
        list(means(first))
        for param in second.parameters():
            own_slice(param).fill_(3.0)
        with pytest.raises(StaleParameterError, match="after their gather had begun"):
            list(means(second))
        list(means(first))
        for param in second.parameters():
            param.fill_(2.0)
        assert [*means(second)] == [2.0] * 2


PROGRAMS = [
    set_one_by_one,
    load_after_another_has_run,
    follow_the_student,
    write_between_two_models,
    write_slices_behind_a_gather,
]


def write_all(level, folder):
    for program in PROGRAMS:
        program(level, folder)


@pytest.mark.parametrize(
    ("level", "transport"),
    [pytest.param(2, "copy_engine", marks=pytest.mark.long), (3, "copy_engine"), (3, "collective")],
)
def test_the_next_gather_has_what_was_written(level, transport, tmp_path):
    run_ranks(write_all, 2, level, tmp_path, init={"transport": transport})


@on_ranks(2)
def test_replacing_the_data_of_a_parameter():
    wrapped = bmt.BMTrainModelWrapper(torch.nn.Sequential(torch.nn.Linear(DIM, DIM)))
    for model in (make(1), wrapped):
        for param in model.parameters():
            kept, before = param.data, param.data.clone()
            param.data = torch.full_like(param, 2.0)  # as programs do that swap in moving averages
            assert bool((param == 2.0).all()) and torch.equal(kept, before)
            param.data = kept
            assert torch.equal(param.data, before)
            kept.mul_(2.0)
            assert torch.equal(param.data, 2 * before)
            for wrong in (torch.ones(3), torch.ones(param.shape, dtype=torch.float64)):
                with pytest.raises(ParameterError):
                    param.data = wrong
            assert torch.equal(param.data, 2 * before)
            param.data.fill_(3.0)
            assert bool((param == 3.0).all())
        models.assert_same_dicts(
            model.state_dict(), {k: x for k, x in states(3.0).items() if k[0] == "0"}, "", 0.0
        )


def look_into_a_stage():
    embed, head = make(2)
    stages = bmt.PipelineTransformerBlockList(list(make(2)))
    with torch.no_grad():
        y = embed(torch.ones(4, DIM))
        sharded_parameter(next(iter(stages.parameters()))).storage_of.gather()
        return float(embed(head(y)).sum())


def test_looking_at_a_pipelined_parameter_between_gathers_of_all_ranks():
    init = {"transport": "copy_engine", "pipe_size": 2}
    assert len(set(run_ranks(look_into_a_stage, 4, init=init))) == 1
