"""The loop of README, smaller, with a record: `own_loop.py --save FOLDER`."""

import json
import pathlib
import sys
from typing import Any

import torch

import bmtrain as bmt

STEPS, SAVE_EVERY, WORDS = 14, 3, 16


def build() -> tuple[Any, Any, bmt.optim.OptimManager]:
    """The model, its optimizer and their manager."""
    layers = [torch.nn.Embedding(WORDS, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, WORDS)]
    model = bmt.BMTrainModelWrapper(torch.nn.Sequential(*layers))
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), lr=1e-2)
    manager = bmt.optim.OptimManager(max_skipped_steps=2)
    manager.add_optimizer(optimizer, bmt.lr_scheduler.Cosine(optimizer, 1e-2, 2, STEPS))
    return model, optimizer, manager


def main(folder: pathlib.Path) -> None:
    """Train, from the last checkpoint on."""
    bmt.init_distributed(seed=0)
    model, optimizer, manager = build()
    loss_of = bmt.loss.FusedCrossEntropy()
    draw = torch.Generator().manual_seed(bmt.rank())
    metrics = folder / "metrics.jsonl"
    with bmt.CheckpointManager(folder) as checkpoints:
        before = checkpoints.restore(model, manager)
        if before is not None and before.state is not None:
            draw.set_state(before.state["draw"])
        begin = before.step if before is not None else 0
        start = f"resuming from step-{begin:08d}" if begin else "starting from scratch"
        bmt.print_rank(start, flush=True)
        if bmt.rank() == 0:
            lines = metrics.read_text("utf-8").splitlines() if metrics.exists() else []
            kept = [line + "\n" for line in lines if json.loads(line)["step"] <= begin]
            metrics.write_text("".join(kept), "utf-8")
        for step in range(begin, STEPS):
            words = torch.randint(WORDS, (4, 8), generator=draw)
            loss = loss_of(model(words).flatten(0, 1), words.flatten())
            manager.zero_grad()
            manager.backward(loss)
            norm = manager.clip_grad_norm(optimizer.param_groups, max_norm=1.0)
            manager.step()
            record = {"step": step + 1, "loss": bmt.sum_loss(loss).item(), "norm": float(norm)}
            if bmt.rank() == 0:
                with metrics.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(record) + "\n")
            if (step + 1) % SAVE_EVERY == 0 or step + 1 == STEPS:
                checkpoints.save(step + 1, model, manager, state={"draw": draw.get_state()})


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[2]))
