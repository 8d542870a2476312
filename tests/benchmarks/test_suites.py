"""Which runs there are, and what is refused."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

ONE = {"gpt2": [1], "2.7b-offload": [1]}
FOUR = {**ONE, "2.7b": [4], "llama-8b": [4], "13b": [4], "13b-large": [4], "scaling": [1, 2, 4]}


def test_words_of_all_suites_are_understood(bench: Any) -> None:
    """And each compares this library with another one."""
    for suite in bench.suites.SUITES:
        backends = {options.backend for options in suite.options()}
        assert "bmtrain" in backends
        assert len(backends) > 1


@pytest.mark.parametrize(
    ("available", "expected"),
    [(0, {}), (1, ONE), (2, ONE | {"2.7b": [2], "scaling": [1, 2]}), (4, FOUR), (7, FOUR)],
)
def test_the_default_depends_on_the_machine(
    bench: Any, available: int, expected: dict[str, list[int]]
) -> None:
    assert {
        suite.name: suite.counts(available) for suite in bench.suites.chosen(None, available)
    } == expected


def test_smaller_batches_come_first(bench: Any) -> None:
    """A batch that does not fit ends its run; and a large one must not find memory cut up for its
    first tries.
    """
    for suite in bench.suites.SUITES:
        for options in suite.options():
            assert list(options.batch) == sorted(options.batch)
            # two to measure, one to plan, and the plan's own
            assert options.recompute != "auto" or options.warmup >= 5


def test_a_suite_that_needs_more_gpus(bench: Any) -> None:
    assert [suite.name for suite in bench.suites.chosen(["13b", "quick"], 4)] == ["quick", "13b"]
    with pytest.raises(SystemExit, match="--suite 13b needs at least 4 GPUs: there are 2"):
        bench.suites.chosen(["13b"], 2)
    with pytest.raises(SystemExit, match="--suite scaling needs at least 2 GPUs: there are 1"):
        bench.suites.chosen(["scaling"], 1)


def test_minutes_count_runs_numbers_of_gpus_and_repeats(bench: Any) -> None:
    suite = bench.suites.Suite(
        name="x", about="", gpus=(1, 2, 4), runs=("a", "b", "c"), seconds=40, scaling=True
    )
    assert suite.minutes(4) == 6.0
    assert suite.minutes(2) == 4.0
    assert dataclasses.replace(suite, repeat=3).minutes(2) == 12.0


@pytest.mark.parametrize(
    ("words", "recompute", "compiles"),
    [
        ("--backend bmtrain", "none", True),
        ("--backend bmtrain --compile --recompute", "all", True),
        ("--backend fsdp2 --no-compile --recompute none", "none", False),
        ("--backend bmtrain --recompute auto --batch 8 24", "auto", True),
    ],
)
def test_options(bench: Any, words: str, recompute: str, compiles: bool) -> None:
    options = bench.options.from_words(words)
    assert (options.recompute, options.compile) == (recompute, compiles)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("--backend fsdp2 --fp8", "--fp8 True: fsdp2 does not have it"),
        ("--backend plain --offload", "--offload True: plain does not have it"),
        ("--backend deepspeed --transport nccl", "--transport nccl: deepspeed does not have it"),
        (
            "--backend fsdp2 --recompute auto",
            "--recompute auto: fsdp2 does not have it; expected one of none, all, selective",
        ),
        (
            "--backend bmtrain --recompute selective",
            "--recompute selective: bmtrain does not have it",
        ),
        (
            "--backend plain --cuda-graph --no-compile",
            "--cuda-graph --no-compile: plain has the graphs of torch.compile",
        ),
        ("--backend fsdp2 --master-weights split", "--master-weights split: fsdp2 does not have"),
        ("--backend fsdp2 --memory-limit 68", "--memory-limit 68.0: fsdp2 does not have it"),
    ],
)
def test_what_a_backend_does_not_have_is_refused(bench: Any, words: str, complaint: str) -> None:
    with pytest.raises(SystemExit, match=complaint):
        bench.options.from_words(words)


@pytest.mark.parametrize(
    ("words", "fits"),
    [("fsdp2 --shape 13b", False), ("fsdp2 --shape 2.7b", True), ("plain --shape 13b", False)],
)
def test_what_cannot_fit_is_not_tried(
    bench: Any, monkeypatch: pytest.MonkeyPatch, words: str, fits: bool
) -> None:
    """13e9 parameters take 200 GiB: on two GPUs of 80 GiB there is no point in trying."""
    monkeypatch.setattr(bench.runs, "machine_from_outside", lambda: {"gpu_gib": 80})
    obstacle = bench.runs.obstacle_to(bench.options.from_words(f"--backend {words}"), 2)
    assert (obstacle == "") is fits
    if not fits:
        (record,) = bench.runs.run(f"--backend {words} --batch 8 24", 2, 1.0)
        assert record["failure"] == obstacle
        assert re.fullmatch(
            r"not tried: weights, .* alone are \d+ GiB a GPU by estimate, of 80", obstacle
        )
        assert record["batch"] == 8


@pytest.mark.parametrize(
    ("gpu", "peak"),
    [("NVIDIA H200", 989e12), ("NVIDIA A100-SXM4-80GB", 312e12), ("NVIDIA GeForce RTX 3090", None)],
)
def test_peak(bench: Any, gpu: str, peak: float | None) -> None:
    assert bench.throughput.peak_flops(gpu) == peak


def test_memory_that_states_take(bench: Any) -> None:
    """16 bytes a parameter, shared by all GPUs unless they are replicated; 14 where weights are half
    of the masters, 4 where the optimizer's are elsewhere.
    """
    number = bench.models.SHAPES["13b"].num_parameters
    for words, expected in (
        ("--backend fsdp2", 4.0),
        ("--backend plain", 16.0),
        ("--backend bmtrain --offload", 1.0),
        ("--backend bmtrain --master-weights split", 3.5),
    ):
        assert bench.options.from_words(words).state_bytes(4) == expected * number
