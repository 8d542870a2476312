"""Ray Train: workers on all hosts of a Ray cluster, each with a GPU if the cluster has some.

    python examples/launch/ray_train.py 16 --model-config Qwen/Qwen3-8B --data /shared/chat.jsonl \
        --save /shared/runs/qwen3 --resume

First the number of workers, then the arguments of `python -m model_center train`. Each step's
figures are reported to Ray. Ray starts the workers and their process group, which is adopted.
"""

import sys

import ray.train
from ray.train.torch import TorchTrainer

from model_center.commands.train import train


def work(config: dict[str, list[str]]) -> None:
    """What each worker does."""
    train(config["arguments"], on_step=ray.train.report)


if __name__ == "__main__":
    ray.init()
    workers, *arguments = sys.argv[1:]
    use_gpu = "GPU" in ray.cluster_resources()
    scaling = ray.train.ScalingConfig(num_workers=int(workers), use_gpu=use_gpu)
    TorchTrainer(work, train_loop_config={"arguments": arguments}, scaling_config=scaling).fit()
