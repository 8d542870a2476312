"""BMTrain's import paths and the small things behind them, without ranks."""

from __future__ import annotations

import importlib
import inspect
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from tests.arch.source import ROOT

import bmtrain
from bmtrain import compat
from bmtrain.errors import ConfigurationError, NotInitializedError, RemovedError

bmt: Any = bmtrain
# What programs of BMTrain 1.0.1 and before import.
LIST = """
global_var: config rank world_size
init: init_distributed is_initialized topology
block_layer: Block CheckpointBlock CheckpointBlockContext TransformerBlockList round_up storage_type_cuda
pipe_layer: PipelineTransformerBlockList PipePreFunction PipePostFunction StagePreFunction StagePostFunction
layer: DistributedModule
parameter: DistributedParameter ParameterInitializer OpAllGather
param_init: init_parameters grouped_parameters init_distributed_parameter iterate_parameters
synchronize: synchronize sum_loss gather_result wait_loader
store: save load allgather_object allgather_objects broadcast_object
wrapper: BMTrainModelWrapper make_distributed model_wrapper_dispatch
utils: round_up check_torch_version tp_split_tensor print_block print_dict print_rank see_memory AverageRecorder
debug: clear set get append extend
hook_func: zero_pre_forward zero_post_forward zero_pre_backward zero_post_backward PreHookFunc PostHookFunc OneStepNoGradFunc
zero_context: ZeroContext
nccl: allReduce allGather reduceScatter broadcast reduce send recv groupStart groupEnd commCount commRank commDestroy NCCLCommunicator getUniqueId commInitRank
distributed.ops: all_gather all_reduce broadcast reduce_scatter send_activations recv_activations OpAllGather OpAllReduce OpBroadcast OpReduceScatter
inspect.format: format_summary
inspect.model: inspect_model inspect_block inspect_pipeline_transformer_block_list
inspect.tensor: inspect_tensor record_tensor InspectTensor InspectTensorManager
optim.optim_manager: OptimManager check_overflow grad_rescale
optim.adam: AdamOptimizer
optim.adam_offload: AdamOffloadOptimizer
loss.cross_entropy: FusedCrossEntropy
loss._function: has_inf_nan
lr_scheduler.warmup: WarmupLRScheduler
lr_scheduler.noam: Noam
lr_scheduler.no_decay: NoDecay
lr_scheduler.linear: Linear
lr_scheduler.cosine: Cosine
lr_scheduler.exponential: Exponential
nn.linear: Linear OpLinear
nn.column_parallel_linear: ColumnParallelLinear
nn.row_parallel_linear: RowParallelLinear
nn.parallel_embedding: VPEmbedding
nn.parallel_linear_func: OpParallelLinear ReduceType
"""
NAMES = dict(line.split(": ") for line in LIST.strip().splitlines())


def test_old_paths_have_the_old_names() -> None:
    """They are the public ones where there is a public one of that name; every module says where its
    things live, and is an attribute of the package, as in BMTrain, where importing the package imports
    it; `synchronize` alone is hidden by the function, as it is there.
    """
    paths = {line.split()[0] for line in compat.NAMES.strip().splitlines()} | set(compat.REMOVED)
    assert paths <= set(NAMES)
    for path, names in NAMES.items():
        module = importlib.import_module(f"bmtrain.{path}")
        package = importlib.import_module(f"bmtrain.{path}".rpartition(".")[0])
        assert module.__doc__
        for name in names.split():
            found, public = getattr(module, name), vars(package).get(name)
            is_own = path in ("nccl", "distributed.ops", "debug") or inspect.ismodule(public)
            assert is_own or public is None or public is found, f"{path}.{name}"
        found = bmt
        for part in path.split("."):
            found = getattr(found, part)
        assert found is (bmt.synchronize if path == "synchronize" else module)


FRESH = """
{first}
import bmtrain as bmt
from bmtrain.synchronize import synchronize, sum_loss, gather_result, wait_loader
import bmtrain.synchronize, bmtrain.nccl, bmtrain.global_var as g
assert bmt.synchronize is synchronize and callable(bmt.synchronize) and bmt.sum_loss is sum_loss
assert bmt.nccl.__name__ == "bmtrain.distributed.nccl" and g.config is bmt.config
bmt.init_distributed("env://", 3, -1, None, 1, device="cpu")
bmt.synchronize(); wait_loader(); bmt.wait_loader()
"""


@pytest.mark.parametrize(
    "first",
    [
        "from bmtrain.synchronize import synchronize",
        pytest.param("", marks=pytest.mark.long),
        pytest.param("import bmtrain.nccl", marks=pytest.mark.long),
        pytest.param("from bmtrain.init import topology", marks=pytest.mark.long),
    ],
)
def test_a_function_and_a_module_of_one_name(first: str) -> None:
    """Whatever is imported first, in a process of its own."""
    command = [sys.executable, "-W", "error", "-c", FRESH.format(first=first)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


USES = """
block_layer.CheckpointBlockContext(None)
block_layer.storage_type_cuda(1)
pipe_layer.StagePreFunction.apply(1, 2)
hook_func.zero_pre_forward(None, None)
hook_func.PreHookFunc.apply(None)
zero_context.ZeroContext(None, {})
store.DistributedStateDictWrapper({})
distributed.ops.send_meta(1, 2, 3)
loss._function.fused_sumexp(1, 2)
nccl.getUniqueId()
nccl.commInitRank(b"", 1, 0)
utils.load_nccl_pypi()
"""


@pytest.mark.parametrize("use", USES.strip().splitlines())
def test_what_has_no_meaning_says_so_when_it_is_used(use: str) -> None:
    """Programs may ask for it all the same."""
    words = r"bmtrain\.\S+ is a part of BMTrain that has no meaning here: \S.*\."
    with pytest.raises(RemovedError, match=words):
        eval(f"bmt.{use}", {"bmt": bmt})
    gone = bmt.block_layer.CheckpointBlockContext
    assert isinstance(gone, type) and not isinstance(torch.nn.Linear(1, 1), gone)
    assert not hasattr(gone, "enter") and gone.__name__ == "CheckpointBlockContext"
    assert "gather" in (gone.__doc__ or "")


def test_arguments_are_in_the_order_of_1_0_1() -> None:
    parameters = inspect.signature(bmt.init_distributed).parameters.values()
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == ["init_method", "seed", "pipe_size", "num_micro_batches", "tp_size"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_has_inf_nan(dtype: torch.dtype) -> None:
    has_inf_nan = bmt.loss._function.has_inf_nan
    for bad in (torch.inf, -torch.inf, torch.nan):
        out, x = torch.zeros(1, dtype=torch.uint8)[0], torch.randn(3, 5).to(dtype).t()
        has_inf_nan(x, out)
        assert out.item() == 0
        x[2, 1] = bad
        has_inf_nan(x, out)
        has_inf_nan(torch.ones(2, dtype=dtype), out)
        assert out.item() == 1
    with pytest.raises(ConfigurationError, match=r"uint8"):
        has_inf_nan(x, torch.zeros(1))
    with pytest.raises(ConfigurationError, match=r"floating point"):
        has_inf_nan(torch.ones(1, dtype=torch.int32), out)


def test_small_helpers() -> None:
    utils, debug = bmt.utils, importlib.import_module("bmtrain.debug")
    assert [utils.round_up(x, 4) for x in (0, 1, 4, 5)] == [0, 4, 4, 8]
    check = utils.check_torch_version
    assert check("1.12.0") > 0 > check("99.0.0") and check(torch.__version__) == 0
    with pytest.raises(ConfigurationError, match="got 'new'"):
        check("new")
    with pytest.raises(NotInitializedError):
        utils.tp_split_tensor(torch.ones(2), 0)
    debug.set("x", torch.ones(2, requires_grad=True))
    debug.append("list", 1)
    debug.extend("list", (2, 3))
    assert not debug.get("x").requires_grad and debug.get("list") == [1, 2, 3]
    assert debug.get("no", 5) == 5
    debug.clear("x")
    assert debug.get("x") is None and debug.get("list")
    debug.clear()
    assert debug.get("list") is None


def test_config_is_written_in_a_run_only() -> None:
    with pytest.raises(NotInitializedError, match="save_param_to_cpu"):
        bmt.config["save_param_to_cpu"] = False
    with pytest.raises(ConfigurationError, match="init_distributed"):
        bmt.config["calc_stream"] = None
    assert bmt.config["save_param_to_cpu"] and bmt.config["zero_level"] == 3
