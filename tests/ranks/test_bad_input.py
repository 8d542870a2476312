"""What bad input gets: an error of the documented type with name, got, expected and remedy, on
every rank, and no hang; the program goes on as if it had not been.
"""

import functools
import inspect
import math
import os
import re
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.children import ran
from tests.ranks import models
from tests.ranks.pairs import Pair
from tests.ranks.runner import on_ranks
from torch import nn

import bmtrain as bmt
import model_center.errors
from bmtrain.errors import (
    AlreadyInitializedError,
    ArgumentError,
    CheckpointError,
    ConfigurationError,
    NotInitializedError,
    ParameterError,
    UnknownNameError,
)
from bmtrain.lr_scheduler import Cosine
from bmtrain.optim import AdamOffloadOptimizer, AdamOptimizer, OptimManager, clip_grad_norm
from bmtrain.runtime import arguments
from model_center.errors import ConfigError
from model_center.layer import Attention, Embedding, Encoder, FeedForward, LayerNorm, Linear
from model_center.model import GPT2Config, T5Config

VALUES = (-math.inf, -1, -0.5, 0, 0.5, 1, 2.5, 3, math.inf)
ALLOWED = {
    "NUMBER": VALUES[1:-1],
    "AMOUNT": (0, 0.5, 1, 2.5, 3),
    "POSITIVE": (0.5, 1, 2.5, 3),
    "BOUND": (0.5, 1, 2.5, 3, math.inf),
    "SHARE": (0, 0.5, 1),
    "PART": (0, 0.5),
    "SIZE": (1, 3),
    "COUNT": (0, 1, 3),
    "WHOLE": (-1, 0, 1, 3),
}


def test_rules():
    """Numbers of Python, numpy and one-element tensors; NaN, texts, None, lists never. 0 and 1 are
    flags, as in files of old.
    """
    for name, allowed in ALLOWED.items():
        rule = getattr(arguments, name)
        assert tuple(value for value in VALUES if rule.holds(value)) == allowed
        for wrong in (math.nan, "1", None, [1], b"1", 1j, True, torch.ones(2), np.float32("nan")):
            assert not rule.holds(wrong), wrong
        assert rule.holds(np.int64(1)) == (1 in allowed)
        assert rule.holds(np.float32(0.5)) == (0.5 in allowed)
    assert all(map(arguments.FLAG.holds, (True, False, 0, 1)))
    assert not any(map(arguments.FLAG.holds, (2, "yes", None, 0.5, [])))
    # for `help`, editors and tools
    assert list(inspect.signature(OptimManager).parameters)[1] == "loss_scale_factor"
    assert "weight_decay" in inspect.signature(AdamOptimizer).parameters
    for kind in (ArgumentError, model_center.errors.ArgumentError):
        assert issubclass(kind, TypeError) and issubclass(kind, ValueError)


call: Any = functools.partial
Bad: Any = ConfigurationError
UNKNOWN = model_center.errors.ArgumentError


def parameters(*shape, **options):
    return [nn.Parameter(torch.ones(*(shape or (1,)), **options))]


class OwnTensor(bmt.DistributedParameter):
    """Makes its tensor itself, as 4-bit weights of CPM-Bee do."""

    def __new__(cls, data):
        return torch.Tensor._make_subclass(cls, data, False)


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = OwnTensor(torch.zeros(2))


def of_optimizers():
    adam = call(AdamOptimizer, parameters())
    manager = models.managed(adam())
    clip = call(manager.clip_grad_norm, parameters())
    load = manager.optimizers[0].load_state_dict
    yield call(adam, lr="1e-3"), ArgumentError, "AdamOptimizer: lr is '1e-3': expected a finite n"
    yield call(adam, betas=0.9), Bad, "betas is 0.9: expected two numbers"
    yield call(adam, betas=(0.9, "0.99")), ArgumentError, "betas is"
    yield call(adam, weigth_decay=1), TypeError, "unexpected keyword argument 'weigth_decay'"
    group = {"params": parameters(), "lr": "x"}
    yield call(AdamOptimizer, [group]), ArgumentError, "AdamOptimizer: lr is 'x'"
    for kind in (AdamOptimizer, AdamOffloadOptimizer):
        yield call(kind, []), ValueError, "empty parameter list"
        meta = call(kind, parameters(2, 3, device="meta"))
        yield meta, ParameterError, f"{kind.__name__} got a parameter of shape (2, 3) on meta"
        yield meta, ParameterError, "computes on cpu: move the model"
        for name in ("lr", "eps", "weight_decay", "hold_steps", "betas"):
            value = (1.0, 0.9) if name == "betas" else -1
            yield call(kind, parameters(), **{name: value}), Bad, f"{name} is "
        for sixth in ((65536,), (1024.0, 0), (0, 10)):
            by_position = call(kind, parameters(), 1e-3, (0.9, 0.999), 1e-8, 0, *sixth)
            yield by_position, ArgumentError, f"{kind.__name__} got {sixth[0]}"
        kind(parameters(), 1e-3, (0.9, 0.999), 1e-8, 0, 0)  # the default of hold_steps
        unknown = call(kind, parameters(), record_dleta=True)
        yield unknown, TypeError, "unexpected keyword argument 'record_dleta'"
    for options, error, words in (
        ({"loss_scale": "8"}, ArgumentError, "loss_scale is '8'"),
        ({"loss_scale": 0}, Bad, "loss_scale is 0"),
        ({"loss_scale": 8, "loss_scale_steps": math.nan}, Bad, "steps is nan"),
        ({"loss_scale": 1, "loss_scale_factor": 0}, Bad, "factor is 0"),
        ({"grad_scale": "2"}, ArgumentError, "grad_scale is '2'"),
        ({"grad_scale": 0}, Bad, "grad_scale is 0"),
        ({"max_skipped_steps": 0}, Bad, "max_skipped_steps is 0"),
        ({"los_scale": 8}, TypeError, "unexpected keyword argument 'los_scale'"),
    ):
        yield call(OptimManager, **options), error, words
    yield call(clip, "1.0"), ArgumentError, "max_norm is '1.0'"
    yield call(clip, 0), Bad, "max_norm is 0"
    yield call(clip, 1.0, "x"), ArgumentError, "norm_type is 'x'"
    yield call(clip, 1.0, 0), Bad, "norm_type is 0"
    yield call(clip, 1.0, 2, math.nan), Bad, "eps is nan"
    yield call(clip_grad_norm, parameters(), 1.0, scale=-1.0), Bad, "scale is"
    cosine = call(Cosine, adam())
    yield call(cosine, "1e-3", 1, 5), ArgumentError, "start_lr is '1e-3'"
    yield call(cosine, 1e-3, 1, "5"), Bad, "end_iter of Cosine: got '5'"
    yield call(cosine, math.inf, 1, 5), Bad, "start_lr is inf"
    two = {"optimizers": [{}, {}], "lr_schedulers": [None]}
    yield call(manager.load_state_dict, two), CheckpointError, "2 optimizers, this manager 1"
    yield call(load, {"spam": 1}), CheckpointError, "'state' and 'param_groups'"
    groups = {"state": {}, "param_groups": [{"params": [0, 1]}]}
    yield call(load, groups), CheckpointError, "groups of [2] parameters, this one of [1]"
    sharded = AdamOptimizer(bmt.Block(nn.Linear(3, 2)).parameters())
    state = sharded.state_dict(gather=True)
    state["state"][0]["exp_avg"] = torch.ones(3, 3)
    words = "'exp_avg' of parameter 0 has shape (3, 3), the parameter (2, 3)"
    yield call(sharded.load_state_dict, state), CheckpointError, words


class NoReset(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3, device="meta"))


def of_modules():
    entropy, layer = bmt.loss.FusedCrossEntropy, nn.Linear(2, 2)
    block, blocks = call(bmt.Block, layer), bmt.TransformerBlockList
    yield call(entropy, ignore_index="a"), ArgumentError, "ignore_index is 'a'"
    yield call(entropy, parallel="yes"), ArgumentError, "parallel is 'yes'"
    yield call(entropy, redution="sum"), TypeError, "unexpected keyword argument 'redution'"
    yield call(bmt.nn.Linear, "4", 4), ArgumentError, "in_features is '4'"
    for root in (9, -1, None, 0.0):
        broadcast = call(bmt.distributed.broadcast, torch.ones(3), root)
        yield broadcast, Bad, f"broadcast got rank {root!r}"
    yield call(block, zerolevel=3), TypeError, "unexpected keyword argument 'zerolevel'"
    yield call(block, compile="yes"), Bad, "compile is 'yes': expected True, False, or None"
    yield call(bmt.Block, 3), Bad, "Block got int: expected a torch.nn.Module"
    yield call(block, zero_level=1), Bad, "zero_level is 1"
    yield call(block, mode="SPAM"), Bad, "mode 'SPAM'"
    odd = nn.Linear(2, 2)
    odd.register_parameter("phase", nn.Parameter(torch.ones(2, dtype=torch.complex64)))
    yield call(bmt.Block, odd), ParameterError, "phase"
    yield call(bmt.DistributedParameter, [1.0]), ParameterError, "got list: expected a tensor"
    yield call(bmt.BMTrainModelWrapper, "model"), Bad, "BMTrainModelWrapper got str"
    yield call(blocks, [layer], num_hidden=0), Bad, "num_hidden is 0"
    yield call(blocks, ["layer"]), Bad, "block list got str"
    yield blocks([nn.Linear(2, 2)]), Bad, "got 0 positional arguments"
    wide = blocks([nn.Bilinear(2, 2, 2)], num_hidden=2)
    yield call(wide, torch.ones(1, 2), torch.ones(1, 2)), Bad, "returned 1 values"
    whole = bmt.BMTrainModelWrapper(nn.Linear(2, 2))
    tie = call(setattr, whole, "weight", torch.ones(2, 2))
    yield tie, ParameterError, "to tie two parameters"
    assign = call(whole.load_state_dict, whole.state_dict(), assign=True)
    yield assign, ParameterError, "assign=False"
    yield whole.half, ParameterError, "before it is sharded"
    yield call(bmt.init_parameters, bmt.Block(NoReset())), ParameterError, "meta"
    yield call(bmt.Block, Own()), ParameterError, "'weight' is a OwnTensor with a tensor of its own"
    yield call(bmt.init_parameters, nn.Linear(2, 2)), Bad, "BMTrainModelWrapper"
    yield call(bmt.config.__getitem__, "world_sise"), UnknownNameError, "world_size"
    yield call(bmt.config.__setitem__, "rank", 3), Bad, "would have no effect"
    yield call(bmt.init_distributed, device="cpu"), AlreadyInitializedError, "shutdown()"


def of_states():
    model = bmt.BMTrainModelWrapper(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)))
    before, load = model.state_dict(), model.load_state_dict
    yield call(load, {**before, "0.weight": torch.ones(5, 4)}), RuntimeError, "[5, 3]"
    some = {name: value for name, value in before.items() if name != "1.bias"}
    yield call(load, some), RuntimeError, "Missing key"
    yield call(load, {**before, "spam": torch.ones(1)}), RuntimeError, "Unexpected key"
    found = load({"0.weight": torch.ones(5, 3), "spam": torch.ones(1)}, strict=False)
    assert found.unexpected_keys == ["spam"]
    assert sorted(found.missing_keys) == ["0.bias", "1.bias", "1.weight"]
    assert torch.equal(model.state_dict()["0.weight"], torch.ones(5, 3))


def of_models():
    gpt2 = call(GPT2Config, vocab_size=10)
    for name, value in (
        *(("dropout_p", wrong) for wrong in (-0.1, 1.5, "0.1", math.nan)),
        *(("norm_eps", wrong) for wrong in (-1, "x", math.nan)),
        *(("num_layers", wrong) for wrong in ("4", 0, -1, 2.0)),
        *(("att_init_std", wrong) for wrong in (-1, math.nan)),
        *(("emb_init_mean", wrong) for wrong in ("0", math.inf)),
        *(("tied", "yes"), ("norm_bias", 3), ("zero_level", 7)),
    ):
        words = f"GPT2Config: {name} is {value!r}: expected"
        yield call(gpt2, **{name: value}), ConfigError, words
    yield call(gpt2, num_layer=3), UNKNOWN, "does not know 'num_layer' (nearest: 'num_layers')"
    buckets = call(T5Config, vocab_size=10, position_bias_num_buckets=0)
    yield buckets, ConfigError, "position_bias_num_buckets is 0"
    wrong: Any
    for wrong in (0, -1, "4", 4.0, True):
        yield call(Linear, wrong, 4), ConfigError, f"dim_in is {wrong!r}"
        yield call(Embedding, wrong, 4), ConfigError, f"vocab_size is {wrong!r}"
        yield call(LayerNorm, wrong), ConfigError, f"dim_norm is {wrong!r}"
        yield call(FeedForward, 4, wrong), ConfigError, f"dim_ff is {wrong!r}"
    yield call(LayerNorm, 4, eps=-1), ConfigError, "LayerNorm: eps is -1"
    yield call(Attention, 8, 2, 4, dropout_p=-1), ConfigError, "dropout_p is -1"
    encoder = call(Encoder, num_layers=1, dim_model=8, dim_ff=8, num_heads=2, dim_head=4)
    yield call(encoder, dropout_p=2), ConfigError, "dropout_p is 2"
    yield call(encoder, num_head=2), UNKNOWN, "does not know 'num_head' (nearest: 'num_heads')"


def of_losses():
    pair = Pair().train(1)
    backward = pair.manager.backward
    many = call(backward, bmt.Block(nn.Linear(3, 3))(torch.ones(2, 3)))
    yield many, Bad, "got (2, 3) torch.float32: expected a scalar loss"
    yield call(backward, torch.ones(())), Bad, "does not require grad"
    yield call(backward, 1.0), Bad, "got float: expected a scalar loss"
    yield backward, Bad, "got NoneType: expected a scalar loss"
    pair.check("nothing was lost")
    pair.train(range(1, 3))


@pytest.mark.parametrize("cases", [of_optimizers, of_modules, of_states, of_models, of_losses])
@on_ranks(2)
def test_bad(cases):
    """Each bad argument is refused on every rank, with what was got and what was expected."""
    for make, error, words in cases():
        with pytest.raises(error, match=re.escape(words)):
            make()
    bmt.synchronize()


@on_ranks(3, join=False)
def test_use_before_init():
    """Everything that needs the process group says so and names the remedy; a world that cannot be
    divided is refused before any group is made, and a good start works afterwards.
    """
    layer = nn.Linear(2, 2)
    uses: dict[str, Callable[[], object]] = {
        "Block": call(bmt.Block, layer),
        "DistributedParameter": call(bmt.DistributedParameter, torch.ones(2)),
        "BMTrainModelWrapper": call(bmt.BMTrainModelWrapper, layer),
        "init_parameters": call(bmt.init_parameters, layer),
        "AdamOptimizer": call(AdamOptimizer, parameters()),
        "AdamOffloadOptimizer": call(AdamOffloadOptimizer, parameters()),
        "OptimManager": OptimManager,
        "clip_grad_norm": call(clip_grad_norm, parameters(), 1.0),
        "sum_loss": call(bmt.sum_loss, torch.ones(())),
        "synchronize": bmt.synchronize,
        "load": call(bmt.load, layer, "nowhere.pt"),
        "save": call(bmt.save, layer, "nowhere.pt"),
        "TransformerBlockList": call(bmt.TransformerBlockList, [layer]),
        "see_memory": call(bmt.see_memory, "now"),
    }
    for name, use in uses.items():
        with pytest.raises(NotInitializedError, match=r"init_distributed\(\)"):
            use()
            raise AssertionError(f"{name} before init_distributed raised nothing")
    assert (bmt.rank(), bmt.world_size()) == (0, 1)
    init = call(bmt.init_distributed, device="cpu")
    for sizes in ({"tp_size": 2}, {"pipe_size": 2}, {"pipe_size": 3, "tp_size": 2}):
        with pytest.raises(Bad, match=r"3 ranks.*(tp_size|pipe_size).*divisible by"):
            init(**sizes)
    for values in WRONG_VALUES:
        with pytest.raises(Bad, match=f"{next(iter(values))}.*expected"):
            init(**values)
    rank, os.environ["RANK"] = os.environ["RANK"], "two"
    with pytest.raises(Bad, match=r"RANK.*'two'.*torchrun"):
        init()
    os.environ["RANK"] = rank
    init()
    assert bmt.world_size() == 3
    bmt.synchronize()


WRONG_VALUES: tuple[dict[str, Any], ...] = (
    {"zero_level": 1},
    {"num_micro_batches": 0},
    {"reduce_dtype": torch.int32},
    {"compile": "yes"},
    {"fp8": 1},
    {"fp8": None},
    {"timeout": -1},
    {"timeout": 0},
)


SCRIPT = """
import time, torch, bmtrain as bmt
bmt.init_distributed(device="cpu")
block = bmt.Block(torch.nn.Linear(4, 4))
if bmt.rank() == 1:
    raise KeyError("the culprit")
block(torch.ones(1, 4)).sum().backward()
time.sleep(300)
"""


@pytest.mark.long
def test_a_rank_that_raises_ends_the_job(tmp_path):
    """Under torchrun the others, who wait in a collective, are ended within seconds; the first
    traceback is the culprit's.
    """
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    begin = time.monotonic()
    options = ["--standalone", "--nproc_per_node=2", str(script)]
    done = ran("-m", "torch.distributed.run", *options, timeout=80)
    elapsed, failed = time.monotonic() - begin, "[rank 1] this rank failed"
    assert done.returncode != 0
    assert failed in done.stderr and "KeyError: 'the culprit'" in done.stderr, done.stderr
    assert done.stderr.index("Traceback") > done.stderr.index(failed), done.stderr
    assert elapsed < 40, f"took {elapsed:.0f} s"
