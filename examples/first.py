"""Teach a small transformer to count: python examples/first.py, or by torchrun."""

import torch

import bmtrain as bmt

bmt.init_distributed(seed=0)  # joins the other processes; on its own, a world of one
layers = [torch.nn.TransformerEncoderLayer(64, 4, 256, 0.0, batch_first=True) for _ in range(4)]
net = torch.nn.Sequential(torch.nn.Embedding(256, 64), *layers, torch.nn.Linear(64, 256))
model = bmt.BMTrainModelWrapper(net)  # any nn.Module: from here on it is sharded
optimizer = bmt.optim.AdamOptimizer(model.parameters(), lr=3e-3)
manager = bmt.optim.OptimManager()
manager.add_optimizer(optimizer)
loss_of = bmt.loss.FusedCrossEntropy()
draw = torch.Generator().manual_seed(bmt.rank())  # every rank draws other rows

for step in range(50):
    rows = (torch.randint(200, (16, 1), generator=draw) + torch.arange(33)).to(bmt.device())
    loss = loss_of(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
    manager.zero_grad()
    manager.backward(loss)
    manager.step()
    if step % 10 == 9:
        bmt.print_rank(f"step {step + 1}: loss {bmt.sum_loss(loss):.3f}")
bmt.save(model, "first.pt")  # whole tensors under plain names, for any number of ranks
