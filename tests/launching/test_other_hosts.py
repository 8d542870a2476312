"""A run goes on at another number of hosts, by the same command."""

import pytest
from tests.launching.test_launched import ROOT, agent, free_port, launch
from tests.training.test_example_parallel import flags, resumed

from model_center.training.metrics_file import read_metrics

GPT2 = str(ROOT / "examples" / "gpt2" / "train.py")


def figures(records):
    """Loss and gradient norm of each step."""
    return {one["step"]: [one["loss"], one["grad_norm"]] for one in records if "loss" in one}


@pytest.mark.long
def test_losses_are_those_of_an_unbroken_run(tmp_path, capfd):
    """Of six steps on two hosts of one rank each, the last three from a checkpoint on one host,
    with one rank (and twice the micro-batches) and with two.
    """
    lines = (f"line {i}: the value of {i * i} is {i % 7}\n" for i in range(3000))
    (tmp_path / "text").write_text("".join(lines), "utf-8")
    command = [*agent(free_port(), 2, 1), GPT2, *flags(tmp_path, "whole")]
    done = launch([(command, {})] * 2)
    assert [code for code, _ in done] == [0, 0], done
    expected = figures(read_metrics(tmp_path / "whole" / "metrics.jsonl"))
    for ranks in (1, 2):
        more = f"--grad-accumulation {2 // ranks}"
        found = figures(resumed(tmp_path, f"part-{ranks}", more, ranks=ranks))
        printed = capfd.readouterr().out
        assert "resuming from" in printed and "step-00000003" in printed, printed
        assert found.keys() == expected.keys() and len(found) == 6
        for number, want in expected.items():
            assert found[number] == pytest.approx(want, rel=1e-5), number
    assert found == expected
