"""What pages take for granted where they say `<!-- given: ... -->`: a small sharded model, its
optimizer, and batches, run in the place of such a block's own beginning.
"""

TEXT = """
import torch
import bmtrain as bmt
from model_center.dataset import DistributedDataLoader


class Given(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(64, 16)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(4))
        self.head = torch.nn.Linear(16, 64)

    def forward(self, ids, targets=None):
        if isinstance(ids, (tuple, list)):
            ids, targets = ids
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x).tanh()
            if bmt.is_initialized():
                bmt.inspect.record_tensor(x, "scores", group="attention")
        logits = self.head(x)
        if targets is None:
            return logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


if not bmt.is_initialized():
    bmt.init_distributed(seed=0)
model = bmt.BMTrainModelWrapper(Given())
optimizer = bmt.optim.AdamOptimizer(model.parameters(), lr=1e-2)
manager = optim_manager = bmt.optim.OptimManager()
manager.add_optimizer(optimizer)
loss_of = bmt.loss.FusedCrossEntropy()
batches = [
    torch.randint(0, 64, (4, 9), generator=torch.Generator().manual_seed(n)).to(bmt.device())
    for n in range(6)
]
batch = (batches[0][:, :-1], batches[0][:, 1:])
loss = model(batch)
rows = [(ids[0, :-1], ids[0, 1:]) for ids in batches]
loader = DistributedDataLoader(rows, batch_size=2)
num_steps = 2
hidden = torch.randn(6, 16, requires_grad=True)
lm_head = torch.nn.Linear(16, 64)
targets = torch.arange(6)
stage, parts, outputs, run_layers = 0, [batches[0]], [], model
rebuild_index = list
"""
