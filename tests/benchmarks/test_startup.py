"""First steps with cold and warm caches: what is started, what is written, and how it looks."""

import json
from pathlib import Path

import pytest
from tests.children import ran

ROOT = Path(__file__).resolve().parents[2]
WORDS = "--backend bmtrain --device cpu --shape tiny --batch 4 2 --profile"


@pytest.mark.long
@pytest.mark.compiler
def test_a_second_start_compiles_nothing(tmp_path):
    """The whole program, on the CPU."""
    words = f"benchmarks/startup.py --device cpu --gpus 1 --name try --folder {tmp_path} --run"
    done = ran(*words.split(), WORDS, cwd=ROOT, PYTHONPATH="")
    assert done.returncode == 0, done.stdout + done.stderr
    written = (tmp_path / "try.json").read_text()
    (record,) = json.loads(written)["records"]
    assert "failure" not in record, record
    assert str(tmp_path) not in written
    assert record["cold_compiled"] > 0 == record["warm_compiled"]
    assert record["cold_s"] > record["warm_s"] > 0
    assert record["warm_loss"] == record["cold_loss"]
