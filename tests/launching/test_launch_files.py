"""The files of examples/launch: short, with a word on how to run them, and commands that programs
take.
"""

from __future__ import annotations

import pathlib
import re
import subprocess

import pytest
import yaml
from tests.launching.commands import check, check_program, commands
from tests.launching.test_launched import ROOT

FOLDER = ROOT / "examples" / "launch"
FILES = sorted(path for path in FOLDER.iterdir() if path.is_file())
SHELL = [path for path in FILES if path.suffix in (".sh", ".sbatch")]
SAME = vars(check_program(["--model-config", "Qwen/Qwen3-8B", "--data", "/shared/chat.jsonl", "--max-length", "4096", "--batch-size", "2", "--lr", "1e-5", "--epochs", "3", "--save", "/shared/runs/qwen3", "--resume"]))  # fmt: skip


def test_all_launchers_are_there() -> None:
    assert [path.name for path in FILES] == [
        "kubernetes_trainjob.yaml",
        "ray_train.py",
        "skypilot.yaml",
        "slurm.sbatch",
        "torchrun_one_host.sh",
        "torchrun_several_hosts.sh",
    ]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_file_is_short_and_says_how_to_run_it(path: pathlib.Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 30 and max(map(len, lines)) <= 100
    top = "\n".join(lines[:8])
    assert f"examples/launch/{path.name}" in top


@pytest.mark.parametrize("path", SHELL, ids=lambda path: path.name)
def test_scripts(path: pathlib.Path) -> None:
    """The shell reads them, and one command in each starts the same training."""
    subprocess.run(["bash", "-n", str(path)], check=True)
    (words,) = commands(path.read_text(encoding="utf-8"))
    assert vars(check(words)) == SAME


def test_slurms_directives() -> None:
    """They stand before the first command, else sbatch does not read them."""
    text = (FOLDER / "slurm.sbatch").read_text(encoding="utf-8")
    head, _, rest = text.partition("\n\n")
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)=?(.*)$", head, re.MULTILINE))
    assert "#SBATCH" not in rest
    assert options["ntasks-per-node"] == options["gpus-per-node"]
    assert options["signal"].startswith("USR1@") and "requeue" in options


def test_skypilot() -> None:
    task = yaml.safe_load((FOLDER / "skypilot.yaml").read_text(encoding="utf-8"))
    assert set(task) == {"name", "num_nodes", "resources", "volumes", "workdir", "setup", "run"}
    assert task["num_nodes"] == 2 and list(task["volumes"]) == ["/shared"]
    (words,) = commands(task["run"])
    assert vars(check(words)) == SAME


def test_kubernetes() -> None:
    job = yaml.safe_load((FOLDER / "kubernetes_trainjob.yaml").read_text(encoding="utf-8"))
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    trainer = job["spec"]["trainer"]
    limits = trainer["resourcesPerNode"]["limits"]
    assert limits == {"nvidia.com/gpu": trainer["numProcPerNode"]}
    words = [*trainer["command"], *trainer["args"]]
    assert all(isinstance(word, str) for word in words)
    assert vars(check(words)) == SAME


def test_ray() -> None:
    """Its arguments are in its docstring; what it does is tried by make test-ray."""
    text = (FOLDER / "ray_train.py").read_text(encoding="utf-8")
    found = re.search(r"ray_train\.py \d+ (.*?)\n\n", re.sub(r"\\\n\s*", " ", text))
    assert found is not None
    check_program(found[1].split())
