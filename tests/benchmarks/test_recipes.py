"""The recipes that are measured are those of the pages, and their figures go into a table."""

import json

import pytest


def test_each_recipe_is_one_command_of_its_page(bench):
    recipes = bench.recipes
    commands = [recipes.command_of(recipe) for recipe in recipes.RECIPES]
    assert len({" ".join(words) for words in commands}) == len(recipes.RECIPES)
    assert {recipes.gpus_of(words) for words in commands} == {1, 2}
    for words in commands:
        started = recipes.started_as(words)
        assert f"--nproc_per_node={recipes.gpus_of(words)}" in started and "make" not in started
    recipe = recipes.Recipe("gpt2", "x", "--no-such-flag", None, 1)
    with pytest.raises(LookupError, match=r"gpt2.md has 0 commands with '--no-such-flag'"):
        recipes.command_of(recipe)


def test_figures_are_medians_after_the_first_steps(bench, tmp_path):
    """Of few steps the last one counts; records of validation are no steps."""
    steps = [
        {"seconds": s, "tokens_per_second": 1000 / s, "memory": 2**30, "loss": s}
        for s in (50.0, 10.0, 1.0, 3.0, 2.0)
    ]
    path = tmp_path / "metrics.jsonl"
    for number, want in ((5, 2.0), (2, 10.0), (1, 50.0)):
        lines = [*steps[:number], {"validation_loss": 1.0}]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        found = bench.recipes.figures(path)
        assert found["step_s"] == want and found["steps"] == number
        assert found["tokens_a_step"] == 1000 and found["first_step_s"] == 50.0
    words = ["a", "--save", "x", "--lr", "1", "--save-iters", "5"]
    assert bench.recipes.without(words, ("--save", "--save-iters")) == ["a", "--lr", "1"]
