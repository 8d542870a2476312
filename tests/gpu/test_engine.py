"""The engine on real GPUs over NCCL, as many ranks as there are GPUs, against plain PyTorch on one
of them.
"""

import contextlib
import itertools
import pathlib
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.ranks import models
from tests.ranks.runner import run_ranks
from tests.tensors import gradient_memory, sharded_parameter

import bmtrain as bmt
from bmtrain.shard.slices import local_of

pytestmark = pytest.mark.gpu
STEPS = 8


def on_gpus(fn, *args, init=None):
    """Run on one rank per GPU."""
    return run_ranks(fn, torch.cuda.device_count(), *args, device=None, timeout=300, init=init)


def train_odd(sharded, level, recompute, kind):
    model = models.shard_whole(level, recompute) if sharded else models.make_whole()
    model = model.to(bmt.device())
    classes = {
        "adam": bmt.optim.AdamOptimizer,
        "offload": bmt.optim.AdamOffloadOptimizer,
        "torch": torch.optim.AdamW,
    }
    optimizer = classes[kind if sharded else "torch"](models.groups_of(model), lr=1e-2)
    manager = bmt.optim.OptimManager()
    if sharded:
        manager.add_optimizer(optimizer)
    for step in range(STEPS):
        models.switch_frozen(model, step)
        optimizer.zero_grad()
        whole = [part.to(bmt.device()) for part in models.batch(step)]
        if sharded:
            tokens, targets = (part.chunk(bmt.world_size())[bmt.rank()] for part in whole)
            manager.backward(models.loss_of(model, tokens, targets, step))
            manager.step()
        else:
            models.loss_of(model, whole[0], whole[1], step).backward()
            optimizer.step()
    return {name: value.cpu() for name, value in models.cloned_state(model).items()}


def compare_odd():
    warnings.filterwarnings(
        "ignore", message=".*Odd(Block runs uncompiled|Model runs block by block)"
    )  # they branch on values
    torch.backends.cuda.matmul.allow_tf32 = False
    want = train_odd(False, 3, False, "torch")
    for level, recompute, kind in itertools.product(
        (2, 3), (False, True), ("adam", "offload", "torch")
    ):
        got = train_odd(True, level, recompute, kind)
        models.assert_same_dicts(got, want, f"ZeRO-{level}, recompute {recompute}, {kind}")


def test_every_oddity_trains_as_plain_pytorch():
    """The CPU suite's oddest model, all ZeRO levels and optimizers, over NCCL."""
    on_gpus(compare_odd)


class Layer(torch.nn.Module):
    """A feed-forward block: (batch, dim) to the same."""

    def __init__(self, dim=512):
        super().__init__()
        self.norm = torch.nn.LayerNorm(dim)
        self.up, self.down = torch.nn.Linear(dim, 4 * dim), torch.nn.Linear(4 * dim, dim)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def make_layers():
    torch.manual_seed(2)
    return [Layer().to(bmt.device()) for _ in range(6)]


def gradients(layers, x):
    for layer in layers:
        x = layer(x)
    x.square().mean().backward()
    return [local_of(param.grad).clone() for layer in layers for param in layer.parameters()]


def compare_compiled():
    # Inductor warns of deprecated parts of torch itself and of TF32 left off, which this test
    # wants.
    warnings.filterwarnings("ignore", module=r"torch\.")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(11)  # the same input everywhere: the sum over ranks is a multiple
    x = torch.randn(64, 512, device=bmt.device())
    want = gradients(make_layers(), x)
    for level, recompute in itertools.product((2, 3), (False, True)):
        layers = bmt.TransformerBlockList(
            [bmt.Block(m, use_checkpoint=recompute, zero_level=level) for m in make_layers()]
        )
        for block in layers:
            block.compile(dynamic=False)
        for number in range(3):
            for param in layers.parameters():
                param.grad = None
            got = gradients(layers, x)
            params = list(layers.parameters())
            for mine, full, param in zip(got, want, map(sharded_parameter, params), strict=True):
                piece = param.cut.piece
                part = full.reshape(-1)[piece.start : piece.stop] * bmt.world_size()
                if part.numel():
                    models.assert_same(
                        mine, part, f"ZeRO-{level}, recompute {recompute}, pass {number}", 2e-5
                    )


def test_compiled_blocks_have_the_gradients_of_plain_ones():
    """Inductor's code on views of ring buffers, saved tensors packed and gathered again, several
    passes.
    """
    on_gpus(compare_compiled)


def forbid_waiting(forbid):
    """Make every synchronisation of the host with the device an error, or allow them again."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls this mode a prototype each time
        torch.cuda.set_sync_debug_mode("error" if forbid else "default")


def train_quietly():
    """Allocated bytes after each bf16 training step, which never makes the host wait."""
    layers = bmt.TransformerBlockList(
        [bmt.Block(m.to(torch.bfloat16), use_checkpoint=False) for m in make_layers()]
    )
    optimizer = bmt.optim.AdamOptimizer(layers.parameters(), lr=1e-3)
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(optimizer)
    x = torch.randn(64, 512, device=bmt.device(), dtype=torch.bfloat16)
    allocated = []
    for step in range(8):
        forbid_waiting(step >= 2)
        manager.zero_grad()
        manager.backward(layers(x).float().square().mean())
        manager.clip_grad_norm(optimizer.param_groups, 1.0)
        manager.step()
        forbid_waiting(False)
        torch.cuda.synchronize()
        allocated.append(torch.cuda.memory_allocated())
    return allocated


def test_a_step_does_not_wait_for_the_device_and_memory_is_static():
    """No synchronisation after warm-up, the same allocation after every later step."""
    for allocated in on_gpus(train_quietly):
        assert len(set(allocated[3:])) == 1, allocated


class Wrapped(torch.nn.Module):
    """A stranger's model: embedding, layers in a list, head and loss."""

    def __init__(self, vocab=512, dim=256):
        super().__init__()
        self.tokens, self.head = torch.nn.Embedding(vocab, dim), torch.nn.Linear(dim, vocab)
        self.layers = torch.nn.ModuleList(
            torch.nn.Sequential(
                torch.nn.LayerNorm(dim), torch.nn.Linear(dim, dim), torch.nn.GELU("tanh")
            )
            for _ in range(4)
        )

    def forward(self, ids, labels):
        x = self.tokens(ids)
        for layer in self.layers:
            x = x + layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), labels.flatten())


@contextlib.contextmanager
def never_idle():
    """The host may only wait for what is an older step's, as the verdict on its gradients: behind that
    the device has work. Torch's mode knows nothing of events.
    """
    event: Any = torch.cuda.Event
    plain = event.synchronize

    def checked(own):
        plain(own)
        assert not torch.cuda.current_stream().query(), "the device waits for the host"

    forbid_waiting(True)
    event.synchronize = checked
    try:
        yield
    finally:
        event.synchronize = plain
        forbid_waiting(False)


def train_wrapped_quietly():
    """Steps of a wrapped model as the README has them, while the device is far behind the host."""
    model = bmt.BMTrainModelWrapper(Wrapped().bfloat16())
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), lr=1e-3)
    manager = bmt.optim.OptimManager(loss_scale=None)
    manager.add_optimizer(optimizer)
    ids = torch.randint(512, (4, 65), device=bmt.device())

    def step():
        loss = model(ids[:, :-1], ids[:, 1:])
        manager.zero_grad()
        manager.backward(loss)
        manager.clip_grad_norm(optimizer.param_groups, max_norm=1.0)
        manager.step()
        return loss.detach()

    first = step().item()
    for _ in range(5):
        step()
    torch.cuda.synchronize()
    with never_idle():
        for _ in range(20):
            torch.cuda._sleep(3 * 10**8)  # 150 ms: more than a busy host takes for a step
            last = step()
    assert last.item() < first


@pytest.mark.parametrize("init", [{}, {"compile": False}], ids=["whole", "by block"])
def test_a_step_of_a_wrapped_model_does_not_wait_for_the_device(init):
    """By default, small models as one graph, and block by block."""
    on_gpus(train_wrapped_quietly, init=init)


def peaks_of_forward():
    """Peak bytes of a forward pass after gradients were cleared and after they were not; bytes of
    the gradients.
    """
    layers = bmt.TransformerBlockList(
        [bmt.Block(m.to(torch.bfloat16), use_checkpoint=False) for m in make_layers()]
    )
    x, peaks = torch.randn(4096, 512, device=bmt.device(), dtype=torch.bfloat16), []
    for clears in (True, True, False):
        if clears:
            layers.zero_grad()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        loss = layers(x).float().square().mean()
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated())
        loss.backward()
    return peaks[1], peaks[2], sum(gradient_memory(block).nbytes for block in layers)


def test_cleared_gradients_leave_their_memory_to_activations():
    for cleared, kept, num_bytes in on_gpus(peaks_of_forward):
        assert kept - cleared > 0.8 * num_bytes, (cleared, kept, num_bytes)


def first_and_later_peaks():
    """Peak bytes of each pass through a block with one large weight; bytes of the weight."""
    head = bmt.Block(torch.nn.Linear(512, 65536, dtype=torch.bfloat16), use_checkpoint=False)
    x, peaks = torch.randn(8, 512, device=bmt.device(), dtype=torch.bfloat16), []
    for _ in range(4):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        head(x).float().square().mean().backward()
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated())
    return peaks, 512 * 65536 * 2


def test_first_passes_need_no_copies_of_large_weights():
    """The checks of the first passes sum the bits of all weights, which takes wider integers."""
    for peaks, num_bytes in on_gpus(first_and_later_peaks):
        assert max(peaks[:2]) - peaks[-1] < 0.6 * num_bytes, (peaks, num_bytes)


def save_and_load(folder):
    path = str(pathlib.Path(folder) / "model.safetensors")
    first = bmt.TransformerBlockList([bmt.Block(m.to(torch.bfloat16)) for m in make_layers()])
    bmt.save(first, path)
    torch.manual_seed(99)
    second = bmt.TransformerBlockList([bmt.Block(Layer().to(torch.bfloat16)) for _ in range(6)])
    bmt.load(second, path)
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        models.assert_same(other.detach(), one.detach(), "loaded", 0.0)


def test_saved_files_load(tmp_path):
    """Full tensors out of GPU shards and back, bit by bit."""
    on_gpus(save_and_load, str(tmp_path))


def measure():
    rows = bmt.benchmark.all_gather(max_size=1 << 16)
    assert rows and all(row.seconds > 0 for row in rows)


def test_the_bandwidth_table():
    on_gpus(measure)
