"""Which runs make up which comparison, as data."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from options import Options, from_words


@dataclasses.dataclass(frozen=True, kw_only=True)
class Suite:
    """Runs of throughput.py on one model that are compared with one another.

    gpus: numbers of GPUs that it is meant for. It is measured with the largest of them that the
    machine has; with `scaling`, with
        all of them that it has.
    runs: arguments of throughput.py.
    seconds: about how long one run takes, start and compilation included.
    repeat: how often all of it is measured, in turn.
    """

    name: str
    about: str
    gpus: Sequence[int]
    runs: Sequence[str]
    seconds: int
    repeat: int = 1
    scaling: bool = False
    in_default: bool = True

    @property
    def least(self) -> int:
        """GPUs that it needs."""
        return self.gpus[1 if self.scaling else 0]

    def counts(self, available: int) -> list[int]:
        """Numbers of GPUs to measure with; none if the machine has too few."""
        found = (
            [count for count in self.gpus if count <= available] if available >= self.least else []
        )
        return found if self.scaling else found[-1:]

    def minutes(self, available: int) -> float:
        """About how long it takes there."""
        return len(self.counts(available)) * len(self.runs) * self.repeat * self.seconds / 60

    def options(self) -> list[Options]:
        """The runs, their words read; fails for words that throughput.py does not know."""
        return [from_words(words) for words in self.runs]


def _runs(common: str, *modes: str) -> tuple[str, ...]:
    return tuple(f"--backend {mode} {common} --profile" for mode in modes)


# Smaller batches come first: what does not fit ends its run. With "auto" the first steps measure
# and plan, so they are more.
SUITES = (
    Suite(
        name="quick",
        about="a first look: GPT-2 124M, few steps",
        gpus=(1, 2, 4, 8),
        seconds=40,
        in_default=False,
        runs=_runs("--shape gpt2 --batch 8", "bmtrain", "plain", "fsdp2"),
    ),
    Suite(
        name="gpt2",
        about="GPT-2 124M on one GPU: does a small model pay for the engine?",
        gpus=(1,),
        seconds=30,
        repeat=3,
        runs=_runs(
            "--shape gpt2 --batch 8 32 --steps 20",
            "bmtrain",
            "plain",
            "bmtrain --fused-head",
            "plain --cuda-graph",
        ),
    ),
    Suite(
        name="gpt2-two-gpus",
        about="GPT-2 124M on two GPUs, beside DistributedDataParallel",
        gpus=(2,),
        seconds=40,
        repeat=2,
        in_default=False,
        runs=_runs(
            "--shape gpt2 --batch 8 32 --steps 20",
            "bmtrain",
            "plain",
            "fsdp2",
            "plain --cuda-graph",
        ),
    ),
    Suite(
        name="2.7b-offload",
        about="GPT 2.7B on one GPU, optimizer in host memory",
        gpus=(1,),
        seconds=90,
        runs=_runs(
            "--shape 2.7b --batch 8 32 --offload --recompute",
            "bmtrain",
            "bmtrain --no-overlap",
            "bmtrain --device-states 16",
            "bmtrain --device-states auto",
            "bmtrain --moments 8bit --master-weights split",
            "fsdp2",
            "deepspeed --no-compile",
        )
        + _runs("--shape 2.7b --batch 8 32 --recompute", "bmtrain"),
    ),
    Suite(
        name="large-one-gpu",
        about="14 and 30 billion parameters, 4096 tokens, on one GPU, states in host memory",
        gpus=(1,),
        seconds=150,
        in_default=False,
        runs=tuple(
            f"--backend {mode} --offload --recompute --warmup 1 --steps 2"
            for mode in (
                "bmtrain --shape llama-14b --batch 4 --micro-batches 4 --fused-head "
                "--device-states 50",
                "bmtrain --shape llama-30b --batch 2 --micro-batches 8 --fused-head "
                "--device-states 5 --moments 8bit --master-weights split",
                "fsdp2 --shape llama-14b --batch 4",
            )
        ),
    ),
    Suite(
        name="large-two-gpus",
        about="Llama-3-8B with 8192 tokens, and 14 billion parameters, states in host memory",
        gpus=(2,),
        seconds=240,
        in_default=False,
        runs=tuple(
            f"--backend {mode} --offload --steps 2"
            for mode in (
                "bmtrain --shape llama-8b --batch 2 --recompute auto --warmup 6 "
                "--device-states auto",
                "fsdp2 --shape llama-8b --batch 2 --recompute --warmup 1",
                "deepspeed --no-compile --shape llama-8b --batch 2 --recompute --warmup 1",
                "bmtrain --shape llama-14b --batch 4 --micro-batches 2 --recompute --fused-head "
                "--warmup 1",
                "fsdp2 --shape llama-14b --batch 4 --recompute --warmup 1",
            )
        ),
    ),
    Suite(
        name="2.7b",
        about="GPT 2.7B",
        gpus=(2, 4, 8),
        seconds=45,
        runs=_runs(
            "--shape 2.7b --batch 8",
            "bmtrain",
            "fsdp2",
            "fsdp2 --recompute",
            "deepspeed --no-compile",
            "bmtrain --transport nccl",
            "bmtrain --recompute",
            "fsdp2 --recompute selective",
            "fsdp2 --no-compile",
            "plain",
        ),
    ),
    Suite(
        name="13b-two-gpus",
        about="GPT 13B of the BMTrain README, 512 tokens, on two GPUs",
        gpus=(2,),
        seconds=95,
        in_default=False,
        runs=_runs(
            "--shape 13b",
            "bmtrain --batch 8",
            "fsdp2 --recompute --batch 8 24",
            "bmtrain --recompute auto --warmup 6 --batch 24 32 64",
            "fsdp2 --batch 8",
            "bmtrain --fp8 --recompute auto --warmup 6 --batch 24",
            "deepspeed --no-compile --recompute --batch 24",
        ),
    ),
    Suite(
        name="13b-16-layers",
        about="16 of the 40 layers of GPT 13B, 512 tokens, on two GPUs",
        gpus=(2,),
        seconds=65,
        in_default=False,
        runs=_runs("--shape 13b-16-layers --batch 8 24", "bmtrain", "fsdp2", "fsdp2 --recompute"),
    ),
    Suite(
        name="llama-8b-16-layers",
        about="16 of the 32 layers of Llama-3-8B, 8192 tokens, on two GPUs",
        gpus=(2,),
        seconds=65,
        in_default=False,
        runs=_runs("--shape llama-8b-16-layers --batch 2", "bmtrain", "bmtrain --fp8", "fsdp2"),
    ),
    Suite(
        name="llama-8b-two-gpus",
        about="Llama-3-8B, 4096 tokens, on two GPUs: recomputation of what does not fit",
        gpus=(2,),
        seconds=110,
        in_default=False,
        runs=_runs(
            "--shape llama-8b-4096",
            "bmtrain --recompute auto --warmup 6 --batch 8",
            "bmtrain --recompute auto --warmup 6 --batch 8 --master-weights split",
            "fsdp2 --recompute --batch 3 4 8",
            "bmtrain --recompute auto --warmup 6 --batch 3 4",
        ),
    ),
    Suite(
        name="llama-8b",
        about="Llama-3-8B, 8192 tokens, bf16 and FP8",
        gpus=(4, 8),
        seconds=85,
        runs=_runs(
            "--shape llama-8b --batch 2",
            "bmtrain",
            "bmtrain --fp8",
            "fsdp2",
            "fsdp2 --recompute selective",
            "bmtrain --fused-head",
        ),
    ),
    Suite(
        name="13b",
        about="GPT 13B of the BMTrain README, 512 tokens, bf16 and FP8",
        gpus=(4, 8),
        seconds=95,
        runs=_runs(
            "--shape 13b",
            "bmtrain --batch 8 24",
            "fsdp2 --recompute --batch 8 24",
            "fsdp2 --batch 8",
            "bmtrain --recompute auto --warmup 6 --batch 32 64",
            "bmtrain --recompute auto --memory-limit 68 --warmup 6 --batch 8",
            "deepspeed --no-compile --recompute --batch 24",
            "bmtrain --fp8 --recompute auto --warmup 6 --batch 24",
            "fsdp2 --recompute selective --batch 8 24",
        ),
    ),
    Suite(
        name="13b-large",
        about="GPT 13B with batches that need recomputation",
        gpus=(4, 8),
        seconds=140,
        runs=(
            *_runs(
                "--shape 13b --batch 32 64",
                "bmtrain --recompute auto --warmup 6",
                "fsdp2 --recompute",
            ),
            *_runs("--shape 13b --batch 32", "deepspeed --no-compile --recompute"),
        ),
    ),
    Suite(
        name="scaling",
        about="weak scaling of GPT 2.7B: the same batch on each GPU",
        gpus=(1, 2, 4, 8),
        seconds=40,
        scaling=True,
        runs=_runs("--shape 2.7b --batch 8", "bmtrain", "fsdp2"),
    ),
)


def chosen(names: Sequence[str] | None, available: int) -> list[Suite]:
    """The suites of these names, by default all that this many GPUs allow.

    Raises:
        SystemExit: for a suite that needs more GPUs.
    """
    if names is None:
        return [suite for suite in SUITES if suite.in_default and suite.counts(available)]
    suites = [suite for suite in SUITES if suite.name in names]
    for suite in suites:
        if not suite.counts(available):
            raise SystemExit(
                f"--suite {suite.name} needs at least {suite.least} GPUs: there are "
                f"{available} to use."
            )
    return suites
