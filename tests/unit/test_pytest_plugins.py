"""What else is installed beside pytest does not end the tests."""

import os
import pathlib
import subprocess
import sys


def test_pytest_benchmark_is_left_out(tmp_path):
    """Its warning beside pytest-xdist, where warnings are errors, ended `make test-gpu ARGS="-n 8"`
    before the first test. A stand-in for it is installed here.
    """
    (tmp_path / "stand_in.py").write_text(
        "def pytest_configure(config):\n    raise RuntimeError('the plugin was loaded')\n"
    )
    facts = tmp_path / "pytest_benchmark-5.1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: pytest-benchmark\nVersion: 5.1.0\n"
    )
    (facts / "entry_points.txt").write_text("[pytest11]\nbenchmark = stand_in\n")
    (tmp_path / "test_nothing.py").write_text("def test_nothing():\n    pass\n")
    root = pathlib.Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}

    def run(*options):
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            *options,
            str(tmp_path / "test_nothing.py"),
        ]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )

    assert "the plugin was loaded" in run().stderr
    done = run("-c", str(root / "pyproject.toml"))
    assert done.returncode == 0, done.stdout + done.stderr
