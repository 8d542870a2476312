"""Train a small model of bytes on a text file: python examples/minimal.py [FILE]."""

import sys
from pathlib import Path

import torch
from torch.nn import TransformerEncoderLayer as Layer

import bmtrain as bmt

SEQ, BATCH, STEPS = 128, 8, 100


class Model(torch.nn.Module):
    """Plain PyTorch: nothing in it knows of ranks or shards."""

    def __init__(self, dim: int = 128, depth: int = 4) -> None:
        super().__init__()
        self.token, self.position = torch.nn.Embedding(256, dim), torch.nn.Embedding(SEQ, dim)
        layers = [Layer(dim, 4, 4 * dim, 0.0, batch_first=True) for _ in range(depth)]
        self.layers = torch.nn.ModuleList(layers)  # its members become blocks: gathered one by one
        self.head = torch.nn.Linear(dim, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.position(torch.arange(SEQ, device=tokens.device))
        mask = torch.nn.Transformer.generate_square_subsequent_mask(SEQ, device=tokens.device)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.head(x)


bmt.init_distributed(seed=0)  # the same seed on every rank: the same model
model = bmt.BMTrainModelWrapper(Model())
optimizer = bmt.optim.AdamOptimizer(model.parameters(), weight_decay=0.01)
manager = bmt.optim.OptimManager()
scheduler = bmt.lr_scheduler.Cosine(optimizer, start_lr=1e-3, warmup_iter=10, end_iter=STEPS)
manager.add_optimizer(optimizer, scheduler)
loss_of = bmt.loss.FusedCrossEntropy()
text = torch.tensor(list(Path(sys.argv[1] if len(sys.argv) > 1 else __file__).read_bytes()))
draw = torch.Generator().manual_seed(bmt.rank())  # every rank reads other places
with bmt.CheckpointManager("minimal") as checkpoints:  # a folder: start again, and it resumes
    before = checkpoints.restore(model, manager)  # weights, optimizer, schedule; None at first
    if before and before.state:  # of each rank; None at another number of ranks
        draw.set_state(before.state["draw"])
    for step in range(before.step if before else 0, STEPS):
        starts = torch.randint(len(text) - SEQ, (BATCH, 1), generator=draw)
        batch = text[starts + torch.arange(SEQ + 1)].to(bmt.device())
        loss = loss_of(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        manager.zero_grad()
        manager.backward(loss)
        norm = manager.clip_grad_norm(optimizer.param_groups, max_norm=1.0)
        manager.step()
        bmt.print_rank(f"step {step}: loss {bmt.sum_loss(loss):.3f}, gradient norm {norm:.2f}")
        if (step + 1) % 50 == 0:
            checkpoints.save(step + 1, model, manager, state={"draw": draw.get_state()})
bmt.save(model, "minimal.pt")  # full tensors under plain names, whatever the number of ranks
