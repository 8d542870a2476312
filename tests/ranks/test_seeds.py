"""Programs of BMTrain's and ModelCenter's documents as their users wrote them, on bmtrain.device() instead of .cuda()."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.ranks import models
from tests.ranks.runner import run_ranks

import bmtrain
import bmtrain as bmt

VOCAB, DIM, BATCH, LENGTH = 17, 12, 2, 5


class Linear(bmt.DistributedModule):
    def __init__(self, columns: int, rows: int) -> None:
        super().__init__()
        self.weight = bmt.DistributedParameter(torch.empty(rows, columns), init_method=torch.nn.init.xavier_normal_)
        self.bias = bmt.DistributedParameter(torch.empty(rows), init_method=torch.nn.init.zeros_)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


class SomeTransformerBlock(torch.nn.Module):
    """Takes the arguments of the quick start's `module(x, 1, 2, 3)`."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Linear(8, 8)

    def forward(self, x: torch.Tensor, a: int, b: int, c: int) -> torch.Tensor:
        return x + torch.tanh(self.inner(x.view(-1, 8))).view(-1) * (a + b - c + 0.5)


class MyModule(bmt.DistributedModule):
    """Quick start, step 2."""

    def __init__(self) -> None:
        super().__init__()
        self.param = bmt.DistributedParameter(torch.empty(1024), init_method=torch.nn.init.normal_)
        self.module_list = torch.nn.ModuleList(
            [
                bmt.CheckpointBlock(SomeTransformerBlock()),
                bmt.CheckpointBlock(SomeTransformerBlock()),
                bmt.CheckpointBlock(SomeTransformerBlock()),
            ]
        )

    def forward(self) -> torch.Tensor:
        x = self.param
        for module in self.module_list:
            x = module(x, 1, 2, 3)
        return x


class MyListModule(bmt.DistributedModule):
    """Quick start, step 3."""

    def __init__(self) -> None:
        super().__init__()
        self.param = bmt.DistributedParameter(torch.empty(1024), init_method=torch.nn.init.normal_)
        self.module_list = bmt.TransformerBlockList(
            [
                bmt.CheckpointBlock(SomeTransformerBlock()),
                bmt.CheckpointBlock(SomeTransformerBlock()),
                bmt.CheckpointBlock(SomeTransformerBlock()),
            ]
        )

    def forward(self) -> torch.Tensor:
        x = self.param
        return self.module_list(x, 1, 2, 3)


def quick_start() -> tuple[torch.Tensor, torch.Tensor]:
    bmt.init_distributed(seed=0, zero_level=2)
    results = []
    for kind in (MyModule, MyListModule):
        torch.manual_seed(4)
        model = kind()
        bmt.init_parameters(model)
        out = model()
        out.square().sum().backward()
        grads = models.full_gradients(model)
        assert all(grad is not None and grad.any() for grad in grads.values())
        assert sorted(grads) == sorted(name for name, _ in model.named_parameters())
        results.append(out.detach())
    return results[0], results[1]


@pytest.mark.parametrize("world_size", [1, 3])
def test_quick_start(world_size: int) -> None:
    """Both models of the quick start run, give equal answers, at any world size."""
    want = run_ranks(quick_start, 1, join=False)[0][0]
    for first, second in run_ranks(quick_start, world_size, join=False):
        models.assert_same(first, want, "with a ModuleList", 1e-6)
        models.assert_same(second, want, "with a TransformerBlockList", 1e-6)


class Embedding(bmt.DistributedModule):
    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = bmt.DistributedParameter(torch.empty(rows, columns), init_method=torch.nn.init.normal_)

    def forward(self, ids: torch.Tensor, projection: bool = False) -> torch.Tensor:
        return F.linear(ids, self.weight) if projection else F.embedding(ids, self.weight)


class TransformerLayer(bmt.DistributedModule):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = Linear(DIM, 3 * DIM), Linear(DIM, DIM)
        self.up, self.down = Linear(DIM, 2 * DIM), Linear(2 * DIM, DIM)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(F.layer_norm(x, (DIM,))).chunk(3, dim=-1)
        scores = (q @ k.transpose(1, 2) / math.sqrt(DIM)).masked_fill(~mask, -1e4)
        x = x + self.out(torch.softmax(scores, -1) @ v)
        return x + self.down(F.gelu(self.up(F.layer_norm(x, (DIM,)))))


class GPT(bmt.DistributedModule):
    """The README's model: `model(ids, pos, mask)`, head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.word, self.position = Embedding(VOCAB, DIM), Embedding(LENGTH, DIM)
        self.transformers = bmt.TransformerBlockList([bmt.CheckpointBlock(TransformerLayer()) for _ in range(3)])

    def forward(self, ids: torch.Tensor, pos: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        causal = torch.arange(LENGTH, device=ids.device)[None, :] <= torch.arange(LENGTH, device=ids.device)[:, None]
        x = self.transformers(self.word(ids) + self.position(pos), causal[None] & mask[:, None, :])
        return self.word(x, projection=True)


def data(iteration: int, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(iteration % 2)
    ids = torch.randint(0, VOCAB, (rows, LENGTH + 1), generator=generator)
    length = torch.full((rows,), LENGTH)
    targets = ids[:, 1:].clone()
    return ids[:, :-1], length, targets


ROWS = 12


def readme() -> list[tuple[float, float]]:
    bmtrain.init_distributed(seed=0)
    model = GPT()
    bmtrain.init_parameters(model)  # or loading checkpoint use `bmtrain.load`
    loss_func = torch.nn.CrossEntropyLoss(ignore_index=-100)
    optimizer = bmtrain.optim.AdamOffloadOptimizer(model.parameters(), weight_decay=1e-2)
    lr_scheduler = bmtrain.lr_scheduler.Noam(optimizer, start_lr=1e-2, warmup_iter=2, end_iter=1000, num_iter=0)
    optim_manager = bmtrain.optim.OptimManager(loss_scale=1024)
    optim_manager.add_optimizer(optimizer, lr_scheduler)
    log = []
    for iteration in range(12):
        parts = [part.chunk(bmtrain.world_size())[bmtrain.rank()].to(bmtrain.device()) for part in data(iteration, ROWS)]
        enc_input, enc_length, targets = parts
        pos = torch.arange(enc_input.size(1)).long().to(bmtrain.device()).repeat(enc_input.size(0), 1)
        logits = model(enc_input, pos, pos < enc_length[:, None])
        batch, seq_len, vocab_out_size = logits.size()
        loss = loss_func(logits.view(batch * seq_len, vocab_out_size), targets.view(batch * seq_len))
        global_loss = bmtrain.sum_loss(loss).item()
        optim_manager.zero_grad()
        optim_manager.backward()
        grad_norm = optim_manager.clip_grad_norm(optimizer.param_groups, max_norm=1.0)
        optim_manager.step()
        log.append((global_loss, float(grad_norm)))
    return log


def test_readme_training_loop() -> None:
    """The README's loop, `backward()` without a loss included, learns, and alike at 1, 2 and 3 ranks."""
    logs = {size: run_ranks(readme, size, join=False) for size in (1, 2, 3)}
    want = logs[1][0]
    assert want[-1][0] < 0.8 * want[0][0]
    for size, ranks in logs.items():
        for log in ranks:
            assert log == ranks[0]
            for number, (got, expected) in enumerate(zip(log, want, strict=True)):
                assert got == pytest.approx(expected, rel=1e-4), f"{size} ranks, iteration {number}"


class Classifier(torch.nn.Module):
    """ModelCenter's quick start: a pretrained body and a new head in a plain module."""

    def __init__(self) -> None:
        super().__init__()
        self.body = GPT()
        bmt.init_parameters(self.body)
        self.dense = Linear(VOCAB, 2)
        bmt.init_parameters(self.dense)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        pos = torch.arange(LENGTH).repeat(len(input_ids), 1)
        return self.dense(self.body(input_ids, pos, attention_mask).mean(1))


def model_center() -> dict[str, Any]:
    bmt.init_distributed(seed=0)
    model = Classifier()
    optimizer = bmt.optim.AdamOffloadOptimizer(model.parameters())
    lr_scheduler = bmt.lr_scheduler.Noam(optimizer, start_lr=1e-2, warmup_iter=2, end_iter=-1)
    loss_func = bmt.loss.FusedCrossEntropy(ignore_index=-100)
    losses, accuracy = [], 0.0
    for epoch in range(10):
        model.train()
        ids, length, _ = (part.chunk(bmt.world_size())[bmt.rank()].to(bmt.device()) for part in data(0, ROWS))
        mask, labels = torch.arange(LENGTH)[None, :] < length[:, None], (ids.sum(1) % 2)
        optimizer.zero_grad()
        logits = model(ids, mask)
        loss = loss_func(logits.view(-1, logits.shape[-1]), labels.view(-1))
        global_loss = bmt.sum_loss(loss).item()
        loss = optimizer.loss_scale(loss)
        loss.backward()
        grad_norm = bmt.optim.clip_grad_norm(optimizer.param_groups, max_norm=10.0, scale=optimizer.scale, norm_type=2)
        bmt.optim_step(optimizer, lr_scheduler)
        bmt.print_rank(
            f"loss: {global_loss:.4f} | lr: {lr_scheduler.current_lr:.4e}, "
            f"scale: {int(optimizer.scale):10.4f} | grad_norm: {grad_norm:.4f} |"
        )
        losses.append(global_loss)
        model.eval()
        with torch.no_grad():
            predicted = model(ids, mask).argmax(dim=-1).cpu().tolist()
            pd = bmt.gather_result(torch.tensor(predicted).int()).cpu().tolist()
            gt = bmt.gather_result(torch.tensor(labels.tolist()).int()).cpu().tolist()
            accuracy = sum(a == b for a, b in zip(gt, pd, strict=True)) / ROWS
        assert len(pd) == ROWS, epoch
    return {"losses": losses, "accuracy": accuracy, "truth": gt}


def test_model_center_training_loop() -> None:
    """ModelCenter's loop of the 0.1.x API learns, alike at 1, 2 and 3 ranks; results are gathered in order."""
    logs = {size: run_ranks(model_center, size, join=False) for size in (1, 2, 3)}
    want = logs[1][0]
    assert want["losses"][-1] < 0.8 * want["losses"][0]
    for size, ranks in logs.items():
        for log in ranks:
            assert log["losses"] == pytest.approx(want["losses"], rel=1e-4), f"{size} ranks"
            assert log["truth"] == want["truth"]
