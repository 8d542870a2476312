"""Packages that only some tokenizers need: the others work without them, and those say what is
missing.
"""

import warnings
from pathlib import Path

import pytest
from tests.children import ran

from model_center.errors import ConfigError
from model_center.optional import package

ROOT = Path(__file__).parents[2]
WITHOUT = """
import sys
for name in ("jieba", "sentencepiece", "tensorboard"):
    sys.modules[name] = None
import model_center.generation, model_center.model, model_center.training
from model_center.dataset import bertdataset, cpm1dataset
from model_center.tokenizer import BertTokenizer, CPM1Tokenizer
folder = sys.argv[1]
print(len(BertTokenizer.from_pretrained(folder + "/bert")("hello")["input_ids"]) > 2)
try:
    CPM1Tokenizer.from_pretrained(folder + "/cpm1").encode("你好")
except ImportError as error:
    print(error)
"""

COMMANDS = """
import contextlib, sys
sys.modules["transformers"] = None
from model_center.__main__ import main
print(main(["preprocess", "--help"]))
with contextlib.suppress(SystemExit):
    main(["convert", "--help"])
"""


def test_what_is_missing_is_named():
    with pytest.raises(
        ConfigError,
        match=r"this needs the package its_name \(No module named 'no_such_package'\): "
        "pip install its_name, or wait",
    ):
        package("no_such_package", "this", ConfigError, name="its_name", instead="wait")


def test_what_it_lacks_itself_is_named(tmp_path, monkeypatch):
    """A package that is there, and needs one that is not."""
    (tmp_path / "half_installed.py").write_text("import no_such_package")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match=r"half_installed \(No module named 'no_such_package'\)"):
        package("half_installed", "this")


def test_warnings_are_shown_once():
    """Asking again for a package does not make Python show again what it has shown."""
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        for _ in range(3):
            warnings.warn("of a step", UserWarning, stacklevel=1)
            package("json", "this")
    assert len(shown) == 1


def run(program):
    done = ran("-c", program, str(ROOT / "tests" / "data" / "tokenizers"))
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.long
def test_the_others_work_without():
    """In a process that cannot import them. Converting needs no transformers; preparing data says
    that it does.
    """
    one, two = run(WITHOUT).stdout.splitlines()
    assert one == "True" and "this tokenizer needs the package jieba (" in two
    done = run(COMMANDS)
    assert done.stdout.startswith("1\nusage: python -m model_center convert")
    assert "preprocess needs the package transformers: pip install transformers" in done.stderr
