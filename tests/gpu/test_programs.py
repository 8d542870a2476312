"""Programs that tests/ranks runs on the CPU, on GPUs over NCCL: inspection, old programs, other
people's models.

Inside the ranks the GPU is torch's default device, so that programs need not name it.
"""

import functools
import sys

import pytest
import torch
from tests.ranks import (
    runner,
    test_communication,
    test_delta,
    test_idioms,
    test_inner_checkpoint,
    test_inspect,
    test_optim,
    test_peft_methods,
    test_seeds,
    test_transformers,
    test_whole_model,
    test_whole_parameters,
)
from tests.verification import subjects
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

import bmtrain as bmt

pytestmark = pytest.mark.gpu
SIZE = torch.cuda.device_count()
ON_TWO = pytest.mark.skipif(SIZE < 2, reason="needs two GPUs")


class DrawnOnTheCpu(TorchFunctionMode):
    """Random tensors of a generator of the CPU, which programs seed, move to the GPU.

    Blocks run uncompiled under a mode.
    """

    # As a mode of torch, which no recomputation needs: under one of a program's own, blocks keep
    # their activations.
    __module__ = "torch"

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        generator = kwargs.get("generator")
        if (
            func in (torch.rand, torch.randn, torch.randint)
            and generator is not None
            and generator.device.type == "cpu"
        ):
            return func(*args, **{**kwargs, "device": "cpu"}).to(bmt.device())
        return func(*args, **kwargs)


def on_its_gpu(program, *args):
    """The program with the GPU as the default device."""
    torch.set_default_device(bmt.device())
    return tree_map_only(torch.Tensor, lambda x: x.cpu(), program(*args))


def drawn_on_the_cpu(program, *args):
    with DrawnOnTheCpu():
        return program(*args)


def with_its_data(program):
    """The program with the tensors of its module on the GPU."""
    names = vars(sys.modules[program.__module__])
    before = {name: value for name, value in names.items() if isinstance(value, torch.Tensor)}
    names |= {name: value.to(bmt.device()) for name, value in before.items()}
    try:
        return program()
    finally:
        names |= before


def run_on_gpus(program, world_size, *args, **options):
    return run_compiled_on_gpus(
        functools.partial(drawn_on_the_cpu, program), world_size, *args, **options
    )


def run_compiled_on_gpus(program, world_size, *args, **options):
    """For programs that draw alike on all devices."""
    options = {**options, "device": None, "timeout": 300}
    return runner.run_ranks(functools.partial(on_its_gpu, program), world_size, *args, **options)


@pytest.mark.parametrize(
    "program", [test_inspect.parameters_of_odd_models, test_inspect.activations]
)
def test_inspection(program):
    """Uncompiled: autograd's thread, in which torch's checkpoint runs a block again, has no mode."""
    run_on_gpus(functools.partial(with_its_data, program), SIZE, init={"compile": False})


@ON_TWO
def test_inspection_of_parallel_models():
    for program, init in (
        (test_inspect.tensor_parallel_parameters, {"tp_size": 2}),
        (test_inspect.pipelined_list, {"pipe_size": 2}),
    ):
        run_on_gpus(functools.partial(with_its_data, program), SIZE, init=init)


# Rows of test_optim's table, in the 0.1.x API.
OLD_PROGRAMS = (
    "adam    bfloat16 old 64 nan     1   late chain one  replaced 3",
    "offload float32 old 64 gradient inf late cycle one  scaled 2",
)


def test_old_programs():
    for line in OLD_PROGRAMS:
        run_on_gpus(test_optim.program, SIZE, line)


def test_the_readme_in_half_precision():
    """Losses and norms; half-precision products round differently on another device, and so do the
    weights.
    """
    results = run_on_gpus(test_seeds.readme, SIZE, "gpt_loop", join=False)
    want, _ = test_seeds.plain_readme(results[0][0], SIZE)
    for _, log, _ in results:
        assert log == [pytest.approx(record, rel=5e-3) for record in want]


def test_verbs():
    run_on_gpus(test_communication.run_cases, SIZE)
    run_on_gpus(test_communication.losses_and_rows, SIZE)
    run_on_gpus(test_communication.verbs, 1)


def test_results_of_whole_models_may_be_kept():
    run_compiled_on_gpus(test_whole_model.kept_results, SIZE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_models_that_cuda_graph_records(dtype):
    run_compiled_on_gpus(test_whole_model.recorded_models, SIZE, dtype)


OTHERS = [
    test_transformers.training,
    test_transformers.checkpointing_flags,
    test_transformers.generating,
    test_peft_methods.training,
    test_delta.before_and_after_sharding,
    functools.partial(test_inner_checkpoint.checkpoints_inside, False),
    functools.partial(test_inner_checkpoint.checkpoints_inside, True),
]


@pytest.mark.parametrize("program", OTHERS)
def test_other_peoples_models(program):
    run_on_gpus(program, SIZE)


@pytest.mark.parametrize("ranks", sorted({1, SIZE}))
def test_scripted_norms_outside_of_blocks(ranks):
    """TorchScript fuses them, in kernels that read memory."""
    run_compiled_on_gpus(test_idioms.scripted_norms, ranks)


@pytest.mark.parametrize("program", [*test_whole_parameters.PROGRAMS, test_idioms.all_idioms])
def test_parameters_look_whole(program):
    run_on_gpus(functools.partial(with_its_data, program), SIZE)


@pytest.mark.parametrize(
    "program", [subjects.correct, subjects.gpt2_example, subjects.llama_on_a_gpu, subjects.bert]
)
def test_verified(program):
    """Ranks on GPUs beside one process on a GPU."""
    report = bmt.verify(program, ranks=SIZE, device="cuda")
    assert report, str(report)
