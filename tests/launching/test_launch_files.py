"""The files of examples/launch: short, with a word on how to run them, and commands that programs
take.
"""

import re
import subprocess

import yaml
from tests.launching.commands import check, check_program, commands
from tests.launching.test_launched import ROOT

FOLDER = ROOT / "examples" / "launch"
FILES = sorted(path for path in FOLDER.iterdir() if path.is_file())
MODEL = "--model-config Qwen/Qwen3-8B --data /shared/chat.jsonl --max-length 4096 --batch-size 2"
SAME = vars(
    check_program(f"{MODEL} --lr 1e-5 --epochs 3 --save /shared/runs/qwen3 --resume".split())
)


def test_files_are_short_and_say_how_to_run_them():
    """One for each launcher. The shell reads scripts, and one command in each starts the same
    training.
    """
    assert [path.stem for path in FILES] == [
        *("kubernetes_trainjob", "ray_train", "skypilot", "slurm"),
        *("torchrun_one_host", "torchrun_several_hosts"),
    ]
    for path in FILES:
        text = path.read_text("utf-8")
        lines = text.splitlines()
        assert len(lines) <= 30 and max(map(len, lines)) <= 100
        assert f"examples/launch/{path.name}" in "\n".join(lines[:8])
        if path.suffix in (".sh", ".sbatch"):
            subprocess.run(["bash", "-n", str(path)], check=True)
            (words,) = commands(text)
            assert vars(check(words)) == SAME


def test_slurms_directives():
    """They stand before the first command, else sbatch does not read them."""
    text = (FOLDER / "slurm.sbatch").read_text("utf-8")
    head, _, rest = text.partition("\n\n")
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)=?(.*)$", head, re.MULTILINE))
    assert "#SBATCH" not in rest
    assert options["ntasks-per-node"] == options["gpus-per-node"]
    assert options["signal"].startswith("USR1@") and "requeue" in options


def test_what_yaml_files_start():
    """The same training; what ray_train.py does is tried by make test-ray: its arguments are in its
    docstring.
    """
    task, job = (
        yaml.safe_load((FOLDER / name).read_text("utf-8"))
        for name in ("skypilot.yaml", "kubernetes_trainjob.yaml")
    )
    assert set(task) == {"name", "num_nodes", "resources", "volumes", "workdir", "setup", "run"}
    assert task["num_nodes"] == 2 and list(task["volumes"]) == ["/shared"]
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    trainer = job["spec"]["trainer"]
    limits = trainer["resourcesPerNode"]["limits"]
    assert limits == {"nvidia.com/gpu": trainer["numProcPerNode"]}
    for words in (*commands(task["run"]), [*trainer["command"], *trainer["args"]]):
        assert all(isinstance(word, str) for word in words)
        assert vars(check(words)) == SAME
    text = (FOLDER / "ray_train.py").read_text("utf-8")
    found = re.search(r"ray_train\.py \d+ (.*?)\n\n", re.sub(r"\\\n\s*", " ", text))
    assert found is not None
    check_program(found[1].split())
