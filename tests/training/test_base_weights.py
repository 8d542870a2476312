"""Checkpoints of a run that trains adapters hold these; the frozen weights are those of its base,
or the run does not go on.
"""

import warnings
from pathlib import Path

import peft
import pytest
import safetensors.torch
import torch
from tests.ranks import models, test_transformers
from tests.ranks.runner import run_ranks
from tests.training.lm_programs import command, on, tiny

import bmtrain as bmt
from bmtrain.checkpoint.shards import ShardedCheckpoint
from bmtrain.errors import CheckpointError
from model_center.errors import ResumeError
from model_center.training.base_weights import BaseWeights, checksum
from model_center.training.checkpoints import Checkpoints
from model_center.training.resuming import read_facts

KINDS = torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.complex64


@pytest.mark.parametrize("dtype", KINDS)
def test_checksum(dtype):
    """It depends on each element, on its sign, and on its place."""
    values = (torch.arange(60) % 7 - 3).view(5, 12).to(dtype)
    found = {checksum(values), checksum(values.flip(0)), checksum(values[:4])}
    for place in range(values.numel()):
        changed = values.clone()
        changed.view(-1)[place] = 0 if values.view(-1)[place] else 1
        found.add(checksum(changed))
    assert len(found) == 3 + values.numel()
    assert checksum(values) == checksum(values.T.contiguous().T)


def test_checksum_of_a_large_tensor():
    """It is taken in parts, of which all count."""
    values = torch.zeros(2**22 + 5)
    found = {checksum(values)}
    for place in (-1, 3):
        changed = values.clone()
        changed[place] = -0.0
        found.add(checksum(changed))
    assert len(found) == 3


def adapted(seed=3):
    """A sharded model with adapters, and a head that is trained."""
    # peft calls transformers so
    warnings.filterwarnings("ignore", message=".*is deprecated and will be removed in v6")
    model = test_transformers.make("llama")
    if seed != 3:
        torch.nn.init.constant_(model.model.layers[1].mlp.up_proj.weight, seed)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    torch.manual_seed(1)
    wrapped = bmt.BMTrainModelWrapper(peft.get_peft_model(model, config))
    return wrapped


def write(folder):
    """A checkpoint of trained adapters, of a frozen weight that was written, of one that is frozen
    since.
    """
    model = adapted()
    base = BaseWeights(model, "a model")
    trained = {name for name, param in model.named_parameters() if param.requires_grad}
    with torch.no_grad():
        for name, param in model.named_parameters():
            if param.requires_grad or name.endswith("layers.0.mlp.up_proj.weight"):
                param.mul_(1.5).add_(0.25)
    for name, param in model.named_parameters():
        if "lm_head" in name:
            param.requires_grad_(False)
    path = Path(folder, "step-00000001")
    checkpoints = Checkpoints(path.parent)
    checkpoints.save({"step": 1}, base, bmt.optim.OptimManager(), {})
    checkpoints.close()
    written = set(ShardedCheckpoint(path).headers)
    changed = {name for name in model.state_dict() if name.endswith("layers.0.mlp.up_proj.weight")}
    assert len(trained) == 5 and len(changed) == 1
    assert written == trained | changed
    with pytest.raises(CheckpointError, match=r"no tensor of the model has the name 'nothing'"):
        bmt.save(model, path.parent / "other.pt", only=["nothing"])
    return {name: value.clone() for name, value in model.state_dict().items()}


def read(folder, want):
    """A model on the same base gets the values of the one that was saved; on another it stays as it
    was.
    """
    path = Path(folder, "step-00000001")
    model, other = adapted(), adapted(seed=4)
    BaseWeights(model, "a model").load(path)
    models.assert_same_dicts(model.state_dict(), want, "read again", 0.0)
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(
        ResumeError,
        match=r"frozen weights of 'a model'. Those of this run, from 'another model', are others: "
        r"'[\w.]*layers\.1\.mlp\.up_proj\.weight'\. Remedy",
    ):
        BaseWeights(other, "another model").load(path)
    models.assert_same_dicts(other.state_dict(), before, "refused", 0.0)


@pytest.mark.parametrize(("writers", "readers"), [(3, 2), (1, 2)])
def test_models(writers, readers, tmp_path):
    """On other numbers of ranks."""
    states = run_ranks(write, writers, str(tmp_path))
    run_ranks(read, readers, str(tmp_path), states[0])


# peft calls transformers so
@pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6")
@pytest.mark.long
def test_a_run_goes_on(tmp_path):
    """LoRA on LLaMA: checkpoints are small, the run that was stopped ends with the same bits, and
    does not go on with another base.
    """
    model = tiny("llama", tmp_path)
    arguments = [*on(model), "--lr 1e-2 --batch-size 2 --lora-rank 4 --save-iters 2 --epochs 9"]

    def go(run, last, more=""):
        command(*arguments, "--save", tmp_path / run, f"--train-iters {last} {more}")
        return tmp_path / run / f"step-{last:08d}"

    whole = ShardedCheckpoint(go("whole", 4)).all()
    assert whole and all(".lora_" in name for name in whole)
    stopped = go("stopped", 2)
    assert read_facts(stopped)["base"]["name"] == str(model)
    before = ShardedCheckpoint(stopped).all()
    after = ShardedCheckpoint(go("stopped", 4, "--resume")).all()
    assert any(not torch.equal(before[name], value) for name, value in after.items())
    models.assert_same_dicts(after, whole, "went on", 0.0)
    weights = safetensors.torch.load_file(model / "model.safetensors")
    name = next(name for name in weights if "down_proj" in name)
    weights[name][0, 0] += 1e-3
    safetensors.torch.save_file(weights, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(ResumeError, match=r"step-00000004 holds what was trained on.*are others"):
        go("stopped", 4, "--resume")
