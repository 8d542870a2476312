"""Ray Train itself, in an environment of its own: make test-ray."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tests.launching.program import compare_with_one_process

import bmtrain as bmt
from bmtrain.runtime import world

ray = pytest.importorskip("ray", reason="make test-ray installs it")
train = pytest.importorskip("ray.train")
pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A cluster on this host; its address."""
    environment = {
        "HOME": str(tmp_path_factory.mktemp("home")),  # Ray keeps its key and its results there
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        context = ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
        yield context.address_info["address"]
        ray.shutdown()


def fit(work, folder, **config):
    """Run a function on two workers."""
    from ray.train.torch import TorchTrainer

    return TorchTrainer(
        work,
        train_loop_config={"out": str(folder), **config},
        scaling_config=train.ScalingConfig(num_workers=2),
        run_config=train.RunConfig(storage_path=str(folder / "ray"), name="run"),
    ).fit()


def manners():
    """What a guest must not change. (torch's compiler leaves a variable when it is imported.)"""
    return [
        sys.excepthook,
        threading.excepthook,
        [signal.getsignal(number) for number in signal.valid_signals()],
        {name: value for name, value in os.environ.items() if "INDUCTOR" not in name},
    ]


def work(config):
    """Two runs, one after another, in Ray's process group."""
    import torch.distributed as dist

    before, default = manners(), dist.group.WORLD
    for _ in range(2):
        bmt.init_distributed(timeout=60)
        current = world.current()
        assert current.is_guest
        assert current.rank == train.get_context().get_world_rank()
        assert current.local_rank == train.get_context().get_local_rank()
        assert current.local_size == train.get_context().get_local_world_size()
        compare_with_one_process()
        world.shutdown()
        assert dist.group.WORLD is default and manners() == before
    dist.barrier()
    main = threading.current_thread() is threading.main_thread()
    words = json.dumps([bmt.world_size(), dist.get_world_size(), main])
    Path(config["out"], f"said-{dist.get_rank()}").write_text(words, "utf-8")


def test_workers_compute_what_one_process_does(cluster, tmp_path):
    fit(work, tmp_path)
    said = [(tmp_path / f"said-{rank}").read_text("utf-8") for rank in range(2)]
    assert said == [json.dumps([1, 2, False])] * 2


def failing(config):
    """The second worker raises while the first waits for it."""
    bmt.init_distributed(timeout=60)
    if bmt.rank() == 1:
        raise ZeroDivisionError("on purpose")
    bmt.synchronize()


def test_an_error_is_rays_to_tell(cluster, tmp_path):
    with pytest.raises(Exception, match="on purpose"):
        fit(failing, tmp_path)


def test_the_example(cluster, tmp_path):
    """examples/launch/ray_train.py trains a tiny model; stopped and started again it goes on."""
    from tests.training.lm_programs import DATA, tiny

    from model_center.training.metrics_file import read_metrics

    model = tiny("gpt2", tmp_path)
    data = str(DATA / "chat" / "train.jsonl")
    arguments = (
        f"--model-config {model} --data {data} --max-length 64 --batch-size 2 --dtype fp32 "
        f"--lr 2e-3 --save {tmp_path / 'out'} --resume"
    ).split()
    for epochs in (1, 2):
        command = [sys.executable, str(ROOT / "examples" / "launch" / "ray_train.py"), "2"]
        found = subprocess.run(
            [*command, *arguments, "--epochs", str(epochs)],
            env={**os.environ, "RAY_ADDRESS": cluster},
            cwd=tmp_path,
            check=False,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=300,
        )
        assert found.returncode == 0, found.stdout
        # Ray has the figures of the last step
        records = [one for one in read_metrics(tmp_path / "out" / "metrics.jsonl") if "loss" in one]
        assert [one["step"] for one in records] == list(range(1, len(records) + 1))
        assert (tmp_path / "out" / "model" / "config.json").is_file()
    losses = [one["loss"] for one in records]
    assert losses[-1] < losses[0]
