"""Which runs there are, and what is refused."""

import dataclasses
import re

import pytest

ONE = {"gpt2": [1], "2.7b-offload": [1]}
FOUR = {**ONE, "2.7b": [4], "llama-8b": [4], "13b": [4], "13b-large": [4], "scaling": [1, 2, 4]}


def test_words_of_all_suites_are_understood(bench):
    """Each compares this library with another one. Smaller batches come first: a batch that does not fit
    ends its run; and a large one must not find memory cut up for its first tries.
    """
    for suite in bench.suites.SUITES:
        backends = {options.backend for options in suite.options()}
        assert "bmtrain" in backends and len(backends) > 1
        for options in suite.options():
            assert list(options.batch) == sorted(options.batch)
            # two to measure, one to plan, and the plan's own
            assert options.recompute != "auto" or options.warmup >= 5
    suite = bench.suites.Suite(
        name="x", about="", gpus=(1, 2, 4), runs=("a", "b", "c"), seconds=40, scaling=True
    )
    assert (suite.minutes(4), suite.minutes(2)) == (6.0, 4.0)
    assert dataclasses.replace(suite, repeat=3).minutes(2) == 12.0


def test_the_default_depends_on_the_machine(bench):
    chosen = bench.suites.chosen
    two = ONE | {"2.7b": [2], "scaling": [1, 2]}
    for available, expected in {0: {}, 1: ONE, 2: two, 4: FOUR, 7: FOUR}.items():
        found = {suite.name: suite.counts(available) for suite in chosen(None, available)}
        assert found == expected
    assert [suite.name for suite in chosen(["13b", "quick"], 4)] == ["quick", "13b"]
    for name, needed, available in (("13b", 4, 2), ("scaling", 2, 1)):
        words = f"--suite {name} needs at least {needed} GPUs: there are {available}"
        with pytest.raises(SystemExit, match=words):
            chosen([name], available)


REFUSED = """
fsdp2 --fp8 | --fp8 True: fsdp2 does not have it
plain --offload | --offload True: plain does not have it
deepspeed --transport nccl | --transport nccl: deepspeed does not have it
fsdp2 --recompute auto | --recompute auto: fsdp2 does not have it; expected one of none, all, selective
bmtrain --recompute selective | --recompute selective: bmtrain does not have it
plain --cuda-graph --no-compile | --cuda-graph --no-compile: plain has the graphs of torch.compile
fsdp2 --master-weights split | --master-weights split: fsdp2 does not have
fsdp2 --memory-limit 68 | --memory-limit 68.0: fsdp2 does not have it
"""


def test_options(bench):
    """What a backend does not have is refused. States take 16 bytes a parameter, shared by all GPUs
    unless they are replicated; 14 where weights are half of the masters, 4 where the optimizer's are
    elsewhere.
    """
    for words, recompute, compiles in (
        ("bmtrain", "none", True),
        ("bmtrain --compile --recompute", "all", True),
        ("fsdp2 --no-compile --recompute none", "none", False),
        ("bmtrain --recompute auto --batch 8 24", "auto", True),
    ):
        options = bench.options.from_words(f"--backend {words}")
        assert (options.recompute, options.compile) == (recompute, compiles)
    for line in REFUSED.strip().splitlines():
        words, complaint = line.split(" | ")
        with pytest.raises(SystemExit, match=complaint):
            bench.options.from_words(f"--backend {words}")
    number = bench.models.SHAPES["13b"].num_parameters
    taken = {"fsdp2": 4.0, "plain": 16.0, "bmtrain --offload": 1.0}
    for words, expected in (taken | {"bmtrain --master-weights split": 3.5}).items():
        options = bench.options.from_words(f"--backend {words}")
        assert options.state_bytes(4) == expected * number


def test_what_cannot_fit_is_not_tried(bench, monkeypatch):
    """13e9 parameters take 200 GiB: on two GPUs of 80 GiB there is no point in trying."""
    monkeypatch.setattr(bench.runs, "machine_from_outside", lambda: {"gpu_gib": 80})
    for words, fits in (
        ("fsdp2 --shape 13b", 0),
        ("fsdp2 --shape 2.7b", 1),
        ("plain --shape 13b", 0),
    ):
        obstacle = bench.runs.obstacle_to(bench.options.from_words(f"--backend {words}"), 2)
        assert (obstacle == "") is bool(fits)
        if not fits:
            (record,) = bench.runs.run(f"--backend {words} --batch 8 24", 2, 1.0)
            assert record["failure"] == obstacle and record["batch"] == 8
            why = r"not tried: weights, .* alone are \d+ GiB a GPU by estimate, of 80"
            assert re.fullmatch(why, obstacle)
    peaks = {
        "NVIDIA H200": 989e12,
        "NVIDIA A100-SXM4-80GB": 312e12,
        "NVIDIA GeForce RTX 3090": None,
    }
    for gpu, peak in peaks.items():
        assert bench.throughput.peak_flops(gpu) == peak
