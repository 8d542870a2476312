"""A few cells of the matrix of faults, and that its verdict can be red."""

import dataclasses
import shutil

import pytest
from scripts.fault_matrix.cells import Bench, Result, blamed, cells
from scripts.fault_matrix.kills import Chain, Kill, with_step
from scripts.fault_matrix.programs import damaged, make_gpt2, records
from scripts.fault_matrix.tables import Table, read


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    """The example."""
    return make_gpt2(tmp_path_factory.mktemp("programs") / "data")


@pytest.fixture(scope="module")
def bench(gpt2, tmp_path_factory):
    """With a run that nobody disturbed, and one that was stopped."""
    return Bench(gpt2, tmp_path_factory.mktemp("bench"))


def cell(kind, moment, rank=1):
    """That of the matrix, and its number."""
    return next(
        (one, number)
        for number, one in enumerate(cells())
        if (one.kind, one.moment, one.rank) == (kind, moment, rank)
    )


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "moment", "rank"),
    [("SIGKILL of a rank", "before the manifest", 0), ("flipped bit", "before resuming", 1)],
)
def test_cells_are_green(bench, kind, moment, rank):
    result = bench.result(*cell(kind, moment, rank))
    assert result.is_green, result


@pytest.mark.long
def test_a_run_that_loses_something_is_red(bench):
    """A program that goes on with another learning rate; a checkpoint that is damaged and counts;
    a fault of which nobody says who it was, and that does not come.
    """
    careless = dataclasses.replace(bench.program, resume=["--lr", "0.02"])
    wrong_bench = Bench.__new__(Bench)
    wrong_bench.__dict__.update(bench.__dict__, program=careless)
    expected, number = cell("SIGKILL of a rank", "forward", 1)
    never = dataclasses.replace(expected, step=1000, codes=1, words="a word that nobody says")
    result = wrong_bench.result(dataclasses.replace(never, start="stopped"), number)
    said = "; ".join(result.wrong)
    assert "the fault did not come" in said and "exit code 0, expected 1" in said
    assert "named [], expected [[1]]" in said and "does not say" in said
    assert "the record differs" in said and not result.equal and not result.is_green


@pytest.mark.long
def test_what_is_damaged_and_lost(bench, tmp_path):
    folder = shutil.copytree(bench.begun("stopped"), tmp_path / "stopped")
    assert damaged(folder) == [] and records(folder)[-1]["step"] == 7
    file = next((folder / "step-00000007").glob("rank-00000-*.bin"))
    file.write_bytes(file.read_bytes()[:-1])
    assert file.name in "".join(damaged(folder))


def test_who_is_named():
    """Who is missing counts before who did something else, and that before torchrun's words."""
    parted = "rank 0 did number 3: barrier; rank 1 did "
    launcher = " failed (exitcode: 82) local_rank: 0 (pid: 7)"
    assert blamed(parted + "not reach the next: it has ended" + launcher) == {1}
    assert blamed(parted + "number 3: gather" + launcher) == {0, 1}
    assert blamed(launcher) == {0} and blamed("all went well") == set()
    assert blamed("[rank 1] this rank failed; the run ends. KeyError: 'x'") == {1}
    assert blamed("rank 0 has failed: CheckpointError: no space (on rank 1)") == {1}
    assert blamed("[rank 1] this rank failed; the run ends. rank 0 has ended (process 3).") == {0}


def test_the_table_counts_what_is_red(tmp_path):
    """Cells, which differ, kills and runs; a red one is written as such."""
    keys = [one.key for one in cells()]
    assert len(set(keys)) == len(keys)
    good = Result("program", "abort", "forward", 1, 82, 1.0, 0.5, 1, True, [1], [], "commit")
    bad = dataclasses.replace(good, wrong=["lost 9 steps"])
    kill = Kill("program", "launcher", 1.0, 9, 1, 1.0, None, [])
    far = with_step(kill, 2)
    assert with_step(kill, 3).wrong == [] and far.lost == 7 and far.wrong
    assert Table([good], [kill], [], 1).red == 0
    table = Table([good, bad], [kill, far], ["a run differs"], 1)
    assert table.red == 3
    table.write(tmp_path / "faults")
    written = (tmp_path / "faults.md").read_text("utf-8")
    assert written.count("**red**: lost 9 steps") == 1 and "a run differs" in written
    assert '"red": 3' in (tmp_path / "faults.json").read_text("utf-8")
    again = read(tmp_path / "faults")
    assert again == dataclasses.replace(table, again=[])
    dataclasses.replace(again, results=[good], again=[bad]).write(tmp_path / "faults")
    assert read(tmp_path / "faults").again == [bad]
    assert "Red at first, and run again since" in (tmp_path / "faults.md").read_text("utf-8")


@pytest.mark.long
@pytest.mark.parametrize("flags", ["", "--offload --dtype bf16 --moments 8bit"])
def test_kills_at_random_times(gpt2, flags, tmp_path):
    """Two, and the run comes to its end as if there had been none; also of runs that save and end
    while updates are under way.
    """
    chain = Chain(gpt2, ["--steps", "25", *flags.split()], tmp_path, seed=1)
    found = chain.kills(2)
    assert len(found) == 2 and not any(kill.wrong for kill in found) and not chain.wrong
    assert len(chain.truth) > 25
