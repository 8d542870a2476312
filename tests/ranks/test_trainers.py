"""accelerate and the Trainer of transformers with a model that is sharded: right, or refused when
it is tried.
"""

import warnings

import accelerate
import pytest
import torch
from tests.ranks import models
from tests.ranks.runner import on_ranks, run_ranks
from torch import nn

import bmtrain as bmt
from bmtrain.errors import ParameterError

ROWS, STEPS, RATE = 12, 3, 0.05


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))


def data():
    generator = torch.Generator().manual_seed(1)
    return torch.utils.data.TensorDataset(
        torch.randn(ROWS, 8, generator=generator), torch.randn(ROWS, 3, generator=generator)
    )


def train(model, optimizer, batches, backward):
    for _ in range(STEPS):
        for x, y in batches:
            optimizer.zero_grad()
            backward((model(x) - y).square().mean() / (1 if batches is PLAIN else bmt.world_size()))
            optimizer.step()


PLAIN = [data().tensors]


def accelerator_here():
    """An Accelerator of this process group."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    return accelerate.Accelerator(cpu=True)


@on_ranks(2)
def test_accelerate_prepares_optimizers_and_loaders():
    """A sharded model stays as it is; optimizers of a model that was wrapped in
    DistributedDataParallel first train nothing.
    """
    plain = make()
    reference = torch.optim.SGD(plain.parameters(), lr=RATE)
    train(plain, reference, PLAIN, torch.Tensor.backward)
    accelerator = accelerator_here()
    assert accelerator.num_processes == bmt.world_size()

    model = bmt.BMTrainModelWrapper(make())
    loader = torch.utils.data.DataLoader(data(), batch_size=ROWS // bmt.world_size())
    optimizer, loader = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=RATE), loader)
    train(model, optimizer, loader, accelerator.backward)
    assert accelerator.clip_grad_norm_(model.parameters(), 0.1) > 0.1
    with pytest.raises(ParameterError, match="cannot hold a sharded model"):
        accelerator.prepare(model)
    train(model, optimizer, loader, accelerator.backward)
    train(plain, reference, PLAIN, torch.Tensor.backward)
    models.assert_same_state(model, plain, "after a refusal")
    ordinary = make()
    held, optimizer, loader = accelerator.prepare(
        ordinary, torch.optim.SGD(ordinary.parameters(), lr=RATE), loader
    )
    late = bmt.BMTrainModelWrapper(held)
    with pytest.raises(ParameterError, match="replaced when its model was sharded"):
        train(late, optimizer, loader, accelerator.backward)


def with_trainer(folder):
    import transformers  # here: it takes seconds

    accelerator_here()
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=19, n_positions=8)
    model = bmt.BMTrainModelWrapper(transformers.GPT2LMHeadModel(config))
    rows = [{"input_ids": torch.arange(6), "labels": torch.arange(6)}] * 4
    settings = transformers.TrainingArguments(
        folder, max_steps=1, use_cpu=True, report_to="none", save_strategy="no"
    )
    before = models.cloned_state(model)
    with (
        warnings.catch_warnings(),
        pytest.raises(ParameterError, match="cannot hold a sharded model"),
    ):
        warnings.simplefilter("ignore")
        transformers.Trainer(model=model, args=settings, train_dataset=rows).train()
    models.assert_same_dicts(model.state_dict(), before, "as it was", 0.0)


@pytest.mark.long
def test_the_trainer_of_transformers_is_refused(tmp_path):
    """It would put the model into DistributedDataParallel. Nothing has been changed then."""
    run_ranks(with_trainer, 2, str(tmp_path), timeout=200)
