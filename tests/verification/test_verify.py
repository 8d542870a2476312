"""bmtrain.verify passes correct programs, finds planted differences, and says why what it cannot
verify cannot be verified.
"""

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.children import ran
from tests.ranks.runner import RankFailure, run_ranks
from tests.verification import subjects

import bmtrain as bmt
from bmtrain.errors import ConfigurationError
from bmtrain.plan.sources import of_function
from bmtrain.verification.compare import compare, relative_tolerance
from bmtrain.verification.program import load_program
from bmtrain.verification.record import Key, Kind, Record
from bmtrain.verification.running import Settings, run_on_ranks, run_reference
from bmtrain.verification.verify import Outcome, _judged

ROOT = Path(__file__).parents[2]
Maker = Callable[[], Any]


def _reference(maker, settings):
    return run_reference(load_program(maker), settings)


def _ranks(maker, settings):
    return run_on_ranks(load_program(maker), settings)


def report(maker, ranks=2, **more):
    """The outcome of `verify`, by the quick processes of the tests."""
    settings = Settings(ranks=ranks, **more)
    (reference,) = run_ranks(_reference, 1, maker, settings, join=False)
    return compare(reference, run_ranks(_ranks, ranks, maker, settings, init=settings.init))


@pytest.mark.parametrize(
    ("maker", "ranks", "level"),
    [
        (subjects.with_a_step, 2, 2),
        *(
            pytest.param(*row, marks=pytest.mark.long)
            for row in (
                (subjects.correct, 3, 2),
                (subjects.in_bfloat16, 2, 3),
                (subjects.with_dropout, 2, 3),
                (subjects.with_batch_norm, 3, 3),
                (subjects.gpt2_example, 2, 3),
                (subjects.llama, 2, 3),
                (subjects.bert, 3, 2),
            )
        ),
    ],
)
def test_correct_programs_pass(maker, ranks, level):
    """Nothing differs, every kind of tensor is compared, and tolerances have room."""
    found = report(maker, ranks, init={"zero_level": level})
    assert found, str(found)
    kinds = {"loss", "gradient", "parameter", "random state", "optimizer state"}
    assert kinds <= found.compared.keys()
    assert found.closest < 0.5


@pytest.mark.parametrize(
    ("maker", "kind", "words"),
    [
        (subjects.buffer_differs, Kind.BUFFER, "2 instead of 1"),
        *(
            pytest.param(*row, marks=pytest.mark.long)
            for row in (
                (subjects.rank_in_arithmetic, Kind.LOSS, "off by"),
                (subjects.gradient_scaled, Kind.GRADIENT, "off by"),
                (subjects.parameter_written, Kind.PARAMETER, "off by"),
                (subjects.generator_moved, Kind.RANDOM, "state differs from one process"),
            )
        ),
    ],
)
def test_planted_differences_are_found(maker, kind, words):
    """The first tensor that differs has its kind, step and size in the report."""
    found = report(maker)
    assert found.verdict == "different" and found.first is not None
    assert (found.first.key.kind, found.first.key.step) == (kind, 1), str(found)
    assert words in found.text
    if kind is Kind.BUFFER:
        assert found.first.rank == 1 and found.first.key.name == "count"


def _reasons():
    """Why each of `UNVERIFIABLE` cannot be verified."""
    said = []
    for maker in UNVERIFIABLE:
        with pytest.raises(ConfigurationError) as error:
            _reference(maker, Settings())
        said.append(str(error.value))
    return said


UNVERIFIABLE = {
    subjects.the_same_model: "another model each time",
    subjects.other_values_each_time: "another model each time",
    subjects.not_repeatable: "does not repeat itself",
    subjects.dropout_on_split_rows: 'batch="same"',
    subjects.uneven_rows: "cannot be split over 2 ranks",
    subjects.no_program: "expected a bmtrain.verify.Program",
    subjects.neither_loss_nor_step: "either a loss",
    subjects.a_model_for_its_maker: "makes a new one",
    subjects.no_model: "expected a torch.nn.Module",
}


def test_what_cannot_be_verified_is_said():
    """A ConfigurationError names the reason; settings, functions that processes cannot find, and a
    run that is there already, too.
    """
    (said,) = run_ranks(_reasons, 1, join=False)
    for words, error in zip(UNVERIFIABLE.values(), said, strict=True):
        assert words in error
    wrong: list[dict[str, Any]] = [{"ranks": 0}, {"steps": 0}, {"timeout": 0}, {"slack": -1.0}]
    for settings in wrong:
        with pytest.raises(ConfigurationError, match="expected a"):
            bmt.verify(subjects.correct, **settings)
    with pytest.raises(ConfigurationError, match="top of a module"):
        bmt.verify(functools.partial(subjects.correct))
    with pytest.raises(ConfigurationError, match="before init_distributed"):
        run_ranks(_inside_a_run, 1)


# A module, and what of it is shown with its file and line; None where it is no module's own fault.
MODULES = {
    "attribute": ("import torch\ntorch.nothing_here\n", "has no attribute 'nothing_here'"),
    "absent": ("\nimport a_package_that_is_absent\n", "named 'a_package_that_is_absent'"),
    "name": ("\nfrom torch import nothing_here\n", "cannot import name 'nothing_here'"),
    "syntax": ("\ndef program(:\n", "SyntaxError: "),
    "value": ("\nint('a')\n", "ValueError: "),
    "raising": ("def program():\n    raise OSError('the disk is away')\n", "the disk is away"),
}


@pytest.mark.parametrize("name", [*MODULES])
def test_a_module_that_fails_shows_its_own_error(name, tmp_path, monkeypatch):
    """While it is imported, and when `plan` calls its function."""
    text, words = MODULES[name]
    module = f"failing_{name}"
    (tmp_path / f"{module}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    users = [of_function] if name == "raising" else [of_function, load_program]
    for user in users:
        with pytest.raises(ConfigurationError) as raised:
            user(f"{module}:program")
        assert words in str(raised.value) and "names no function" not in str(raised.value)
        assert f'{module}.py", line 2' in str(raised.value)


def test_a_name_that_is_none_is_said(tmp_path, monkeypatch):
    """A missing module or function, a module inside of none, a path, nothing before the colon."""
    (tmp_path / "whole.py").write_text("number = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("nowhere:f", "whole:f", "whole.inner:f", "./whole.py:f", ":f", "whole:number"):
        with pytest.raises(
            ConfigurationError, match=r"names no function .*expected module:function"
        ):
            load_program(name)


def _inside_a_run():
    bmt.verify(subjects.correct)


def test_refusals_and_failures_are_told_apart():
    """All ranks refuse: refused. One rank alone, or anything else: failed."""
    settings, reference = Settings(), Record()
    no, died, well = Outcome(refusal="no"), Outcome(failure="died"), Outcome(record=Record())
    assert _judged(reference, [no, no], settings).verdict == "refused"
    assert _judged(reference, [no, well], settings).verdict == "failed"
    assert _judged(reference, [no, died], settings).text == "rank 1: died\nrank 0: no"
    assert _judged(reference, [well, well], settings).verdict == "same"


def _record(**values):
    out = Record(terms=64, coarsest=torch.finfo(torch.float32).eps)
    for name, value in values.items():
        out.add(1, Kind.GRADIENT, name, value)
    return out


ONES = torch.ones(3)


@pytest.mark.parametrize(
    ("got", "words"),
    [
        ({"a": ONES}, ""),
        ({"a": ONES * (1 + 5e-6)}, ""),
        ({"a": ONES * (1 + 5e-5)}, "off by"),
        ({"a": None}, "there is none"),
        ({"a": ONES, "b": ONES}, "one process has none"),
        ({"a": torch.ones(4)}, "of shape"),
        ({"a": ONES.double()}, "float64"),
        ({"a": torch.tensor([1.0, float("nan"), 1.0])}, "nan instead of 1"),
        ({}, "there is none"),
        ({"a": ONES, "c": ONES}, "one process has none"),
    ],
)
def test_tensors_are_compared_by_value_shape_dtype_and_presence(got, words):
    """With one that has a value, `a`, and one that has none, `b`."""
    found = compare(_record(a=ONES, b=None), [_record(**{"b": None, **got})])
    assert bool(found) == (not words) and words in found.text, str(found)


def test_noise_stays_noise_and_nothing_else_passes():
    """A gradient that cancels may be rounding, and an optimizer may make a step of it; a real
    element may not.
    """
    reference, ranks = (
        _record(weight=torch.tensor([1.0, 1.0]), bias=torch.tensor([1e-9, 1e-3])),
        Record(),
    )
    for key, value in reference.values.items():
        ranks.values[key] = value
    ranks.values[Key(1, Kind.GRADIENT, "bias")] = torch.tensor([-1e-9, 1e-3])
    for step, moved in ((0, 0.0), (1, 0.01)):
        reference.add(step, Kind.PARAMETER, "bias", torch.tensor([1 - moved, 1 - moved]))
        ranks.add(step, Kind.PARAMETER, "bias", torch.tensor([1 + moved, 1 - moved]))
    assert compare(reference, [ranks])
    ranks.values[Key(1, Kind.PARAMETER, "bias")] = torch.tensor([1 - 0.01, 1 + 0.01])
    assert not compare(reference, [ranks])


def test_tolerances_follow_the_dtype():
    """Half precision counts by its own eps, sums by fp32's; nothing is allowed before the first
    step and for whole numbers.
    """
    fine, coarse = Record(terms=100, coarsest=2.0**-23), Record(terms=100, coarsest=2.0**-7)
    whole, single = Record(terms=100, coarsest=2.0**-52), torch.float32
    on_cpu = relative_tolerance(fine, single, 1, "cpu")
    assert on_cpu == pytest.approx(8 * 11 * 2.0**-23)
    found = relative_tolerance(coarse, single, 1, "cpu")
    assert found == pytest.approx(8 * 2.0**-7, rel=1e-3)
    found = relative_tolerance(whole, torch.float64, 2, "cpu")
    assert found == pytest.approx(2 * 8 * 11 * 2.0**-52)
    assert relative_tolerance(fine, single, 1, "cuda") >= 4 * on_cpu
    assert relative_tolerance(fine, single, 0, "cpu") == 0
    assert relative_tolerance(fine, torch.int64, 1, "cpu") == 0


def command(*words):
    """The status and the output of a program of Python's."""
    path = f"{ROOT / 'src'}{os.pathsep}{ROOT}"
    done = ran(*words, cwd=ROOT, timeout=120, PYTHONPATH=path, CUDA_VISIBLE_DEVICES="")
    return done.returncode, done.stdout + done.stderr


SUBJECTS = "tests.verification.subjects"


@pytest.mark.long
@pytest.mark.parametrize(
    ("function", "status", "words"),
    [
        ("correct", 0, "same: 1 steps on 2 ranks"),
        ("rank_in_arithmetic", 1, "different: step 1, loss, rank 0"),
        ("refused", 3, "refused: on all ranks, ConfigurationError: this model is for one process"),
        ("dying", 4, "rank 1 has had enough"),
        ("fails_alone", 2, "the program fails in one plain process already"),
        ("nothing", 2, "has no attribute 'nothing'"),
    ],
)
def test_the_command_prints_the_outcome_and_has_its_status(function, status, words):
    options = f"-m bmtrain verify {SUBJECTS}:{function} --steps 1 --timeout 60"
    code, said = command(*options.split())
    assert code == status and words in said, said


@pytest.mark.long
def test_under_torchrun_the_ranks_are_those_that_there_are():
    """Without a command there is a list."""
    options = f"-m bmtrain verify {SUBJECTS}:correct --steps 1"
    torchrun = "-m torch.distributed.run --standalone --nproc_per_node=2"
    code, said = command(*torchrun.split(), *options.split())
    assert code == 0 and said.count("same: 1 steps on 2 ranks") == 1, said
    code, said = command("-m", "bmtrain")
    assert code == 0 and "verify" in said


@pytest.mark.long
def test_parameters_without_values_are_refused():
    with pytest.raises(ConfigurationError, match="parameters without values"):
        report(subjects.without_values)


def test_a_rank_that_dies_is_no_silence():
    with pytest.raises((ZeroDivisionError, RankFailure)):
        report(subjects.dying)
