"""BMTrain's import paths and the small things behind them, without ranks."""

import importlib
import importlib.util
import inspect
from typing import Any

import pytest
import torch
from tests.children import ran
from tests.unit.test_surface import surface

import bmtrain
from bmtrain import compat
from bmtrain.errors import (
    BMTrainError,
    ConfigurationError,
    MissingNameError,
    NotInitializedError,
    RemovedError,
)

bmt: Any = bmtrain
# Names between two releases of BMTrain.
OLDER = {"store": ["allgather_object"]}
NAMES = {
    path.removeprefix("bmtrain.").removeprefix("bmtrain"): names
    for path, names in surface().items()
    if path.startswith("bmtrain")
}


def test_old_paths_have_the_old_names():
    """They are the public ones where there is a public one of that name; every module says where its
    things live, and is an attribute of the package, as in BMTrain, where importing the package imports
    it; functions of the same names hide some, as they do there.
    """
    made = f"{compat.NAMES}{compat.IMPORTED}".splitlines()
    removed = compat.REMOVED.strip().split("\n\n")
    own = {"nccl", "utils"}  # modules of the library, which get a few names more
    paths = {line.split()[0] for line in [*made, *removed] if line} - own
    assert paths <= set(NAMES)
    hidden = set()
    for path in paths:
        module = importlib.import_module(f"bmtrain.{path}")
        parent, _, last = path.rpartition(".")
        package = vars(importlib.import_module(f"bmtrain.{parent}".rstrip(".")))
        assert module.__doc__ and importlib.util.find_spec(f"bmtrain.{path}")
        older = OLDER.get(path, [])
        assert {*older} <= {*module.__all__} <= {*older, *NAMES[path]}
        for name in module.__all__:
            found, public = getattr(module, name), package.get(name)
            is_own = path in ("distributed.ops", "debug") or name == "CheckpointBlock"
            is_own |= inspect.ismodule(public)
            assert is_own or public is None or public is found, f"{path}.{name}"
        if package[last] is not module:
            hidden.add(path)
            assert package[last] is getattr(module, last)
    measured = {f"benchmark.{name}" for name in ("all_gather", "reduce_scatter", "send_recv")}
    assert hidden == {"synchronize", *measured}


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
def test_a_function_and_a_module_of_one_name(first):
    """Whatever is imported first, in a process of its own."""
    done = ran("-W", "error", "-c", FRESH.format(first=first))
    assert done.returncode == 0, done.stderr


USES = """
block_layer.CheckpointBlockContext(None)
block_layer.storage_type_cuda(1)
pipe_layer.StagePreFunction.apply(1, 2)
hook_func.zero_pre_forward(None, None)
hook_func.PreHookFunc.apply(None)
zero_context.ZeroContext(None, {})
store.DistributedTensorWrapper(1)
optim._function.adam_cpu(1)
optim._distributed.state_dict_gather({})
distributed.ops.send_meta(1, 2, 3)
loss._function.fused_sumexp(1, 2)
nccl.getUniqueId()
nccl.commInitRank(b"", 1, 0)
utils.load_nccl_pypi()
pipe_layer.OpMicroForward.apply(1)
checkpointing.CheckpointFunction.apply(1)
"""


@pytest.mark.parametrize("use", USES.strip().splitlines())
def test_what_has_no_meaning_says_so_when_it_is_used(use):
    """Programs may ask for it all the same."""
    words = r"bmtrain\.\S+ is a part of BMTrain that has no meaning here: \S.*\."
    with pytest.raises(RemovedError, match=words):
        eval(f"bmt.{use}", {"bmt": bmt})
    gone = bmt.block_layer.CheckpointBlockContext
    assert isinstance(gone, type) and not isinstance(torch.nn.Linear(1, 1), gone)
    assert not hasattr(gone, "enter") and gone.__name__ == "CheckpointBlockContext"
    assert "gather" in (gone.__doc__ or "")


@pytest.mark.parametrize(
    ("where", "name", "words"),
    [
        ("", "clip_grad_norm", "bmtrain has no 'clip_grad_norm': import it from bmtrain.optim"),
        ("", "print_inspect", "from bmtrain.inspect"),
        ("", "all_reduce", "from bmtrain.distributed"),
        (".optim", "Noam", "from bmtrain.lr_scheduler"),
        (".loss", "CrossEntropy", "nearest: 'FusedCrossEntropy'"),
    ],
)
def test_a_name_that_is_elsewhere(where, name, words):
    """The error says where, and is an AttributeError for those who ask before they take."""
    module = importlib.import_module(f"bmtrain{where}")
    with pytest.raises(MissingNameError, match=words) as caught:
        getattr(module, name)
    assert isinstance(caught.value, BMTrainError) and not hasattr(module, name)
    assert not hasattr(module, "__wrapped__")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_has_inf_nan(dtype):
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


def test_small_helpers():
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
