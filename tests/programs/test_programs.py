"""Random programs of fixed seeds compute on ranks what one process computes, or are refused."""

import pytest
from tests.programs.__main__ import shrunk
from tests.programs.features import BETWEEN, KINDS, OPTIONS, draw
from tests.programs.pool import judge

PER_TEST, NUM_TESTS, NUM_SHORT = 15, 10, 4


@pytest.mark.parametrize(
    "first",
    [
        pytest.param(number * PER_TEST, marks=() if number < NUM_SHORT else pytest.mark.long)
        for number in range(NUM_TESTS)
    ],
)
def test_programs_are_right_or_refused(first):
    """Each failing seed is named with its program, and with the command that runs it again."""
    failed = []
    for seed in range(first, first + PER_TEST):
        spec = draw(seed)
        verdict = judge(spec)
        if not verdict:
            failed.append(
                f"python -m tests.programs {seed} --shrink\n  {spec}\n  {verdict.word}: "
                f"{verdict.detail}"
            )
    assert not failed, "\n".join(failed)


def test_a_fault_is_found_and_made_small():
    """A parameter of another value on the ranks is wrong, whatever else the program does."""
    spec = draw(36, ranks=2)
    assert len(spec.layers) > 1 and spec.between and spec["clip"] != OPTIONS["clip"][0]
    broken = type(spec)(
        spec.seed,
        2,
        {**spec.options, "wrap": "faulty", "dtype": "float32"},
        spec.layers,
        spec.between,
    )
    verdict = judge(broken)
    assert verdict.word == "wrong"
    smallest, now = shrunk(broken, verdict)
    assert now.word == "wrong" and smallest.layers == ("linear",) and not smallest.between
    assert [name for name, value in smallest.options.items() if value != OPTIONS[name][0]] == [
        "wrap"
    ]


def test_a_program_is_that_of_its_seed():
    assert draw(5) == draw(5) and draw(5) != draw(6)


def test_seeds_reach_every_choice():
    """Nothing of the tables is never drawn."""
    specs = [draw(seed) for seed in range(3000)]
    for name, choices in OPTIONS.items():
        assert {*choices} <= {spec[name] for spec in specs}, name
    assert {*KINDS} <= {kind for spec in specs for kind in spec.layers}
    assert {*BETWEEN} <= {what for spec in specs for _, what in spec.between}
