"""What runs on a CPU does not need Triton, which many machines do not have."""

from tests.children import ran

PROGRAM = """
import sys
sys.modules["triton"] = None
import torch
import bmtrain as bmt
bmt.init_distributed(device="cpu")
model = torch.nn.Sequential(*(bmt.Block(torch.nn.Linear(8, 8).to(dtype)) for dtype in (torch.float32, torch.float32)))
optimizer = bmt.optim.AdamOptimizer(model.parameters(), lr=1e-2)
manager = bmt.optim.OptimManager(loss_scale=16.0)
manager.add_optimizer(optimizer)
for _ in range(2):
    manager.zero_grad()
    logits = model(torch.ones(4, 8))
    loss = bmt.loss.FusedCrossEntropy()(logits, torch.arange(4))
    loss = loss + bmt.loss.FusedLinearCrossEntropy()(logits, torch.ones(5, 8), torch.arange(4))
    manager.backward(loss)
    manager.clip_grad_norm(optimizer.param_groups, 0.1)
    manager.step()
print("trained")
"""


def test_training_on_a_cpu():
    done = ran("-c", PROGRAM)
    # torch 2.8 to 2.10 print what Gloo connects to
    said = [line for line in done.stdout.splitlines() if not line.startswith("[Gloo]")]
    assert said == ["trained"], done.stderr[-2000:]
