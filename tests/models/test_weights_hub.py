"""From names to folders, with a client in place of the hub."""

import fnmatch
import types
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import RepositoryNotFoundError
from tests.ranks.runner import run_ranks

import bmtrain as bmt
from model_center.errors import IdentifierError
from model_center.hub.identifiers import LOCAL_ONLY, REPOSITORIES
from model_center.hub.resolving import ANSWER, resolve

README = """
bert-base-cased bert-large-cased bert-base-uncased bert-large-uncased bert-base-chinese bert-base-multilingual-cased kv-plm
cpm1-large cpm2-large roberta-base roberta-large t5-small t5-base t5-large t5-3b t5-11b t5-v1_1-small t5-v1_1-base t5-v1_1-large
t5-v1_1-xl t5-v1_1-xxl mt5-small mt5-base mt5-large mt5-xl mt5-xxl mengzi-t5-base flan-t5-small flan-t5-base flan-t5-large
flan-t5-xl flan-t5-xxl gpt2-base gpt2-medium gpt2-large gpt2-xl wenzhong-gpt2-3.5b gptj-6b lawformer glm-10b-zh
vit-base-patch16-224 vit-base_patch16_224
"""


class Hub:
    """A hub in a folder: repositories are folders below it, "org--name"; its cache is another."""

    def __init__(self, root, **files):
        self.root = root
        self.files = {name.replace("__", "/"): names.split() for name, names in files.items()}

    @property
    def log(self):
        path = self.root / "log"
        return path.read_text().splitlines() if path.exists() else []

    def __call__(self, repository, patterns, local_only):
        with (self.root / "log").open("a") as log:
            log.write(f"{bmt.rank()} {'cache' if local_only else 'fetch'} {repository}\n")
        folder = self.root / repository.replace("/", "--")
        if not local_only:
            if repository not in self.files:
                raise OSError(f"404: no {repository}\nmore about it")
            folder.mkdir(exist_ok=True)
            for name in self.files[repository]:
                if any(fnmatch.fnmatch(name, pattern) for pattern in patterns):
                    (folder / name).touch()
        elif not folder.exists():
            raise FileNotFoundError(f"{repository} is not in the cache")
        return str(folder)


def names(folder):
    return {path.name for path in Path(folder).iterdir()}


def test_folders_and_the_old_cache_come_first(tmp_path, monkeypatch):
    """The cache where it has the files; every name of ModelCenter's documents is known."""
    for name in README.split():
        assert (name in REPOSITORIES) != (name in LOCAL_ONLY), name
    monkeypatch.chdir(tmp_path)
    hub, cache = (
        Hub(tmp_path, **{"google-t5__t5-base": "config.json spiece.model"}),
        tmp_path / "cache",
    )
    (tmp_path / "gpt2-base").mkdir()
    for file in ("t5-base/pytorch_model.pt", "cpm1-large/config.json"):
        (cache / file).parent.mkdir(parents=True)
        (cache / file).touch()
    assert resolve(str(tmp_path), "model", hub) == str(tmp_path)
    assert resolve("gpt2-base", "config", hub, cache) == "gpt2-base"
    assert resolve("t5-base", "model", hub, cache) == str(cache / "t5-base")
    assert resolve("cpm1-large", "config", hub, cache) == str(cache / "cpm1-large")
    assert not hub.log
    assert names(resolve("t5-base", "tokenizer", hub, cache)) == {"config.json", "spiece.model"}
    assert hub.log == ["0 fetch google-t5/t5-base"]


def test_only_what_is_needed_is_fetched(tmp_path):
    """Safetensors if there are any, and what goes into the files that the model writes."""
    hub = Hub(
        tmp_path,
        **{
            "google-bert__bert-base-cased": "config.json model.safetensors pytorch_model.bin "
            "flax_model.msgpack vocab.txt model.fp16.safetensors",
            "some__old": "config.json pytorch_model-00001-of-00002.bin",
        },
    )
    for name, kind, wanted in (
        ("bert-base-cased", "config", {"config.json"}),
        ("bert-base-cased", "model", {"config.json", "model.safetensors", "vocab.txt"}),
        ("some/old", "model", {"config.json", "pytorch_model-00001-of-00002.bin"}),
    ):
        assert names(resolve(name, kind, hub, tmp_path)) == wanted
    with pytest.raises(
        IdentifierError, match="some/old has no tokenizer files: expected any of voc"
    ):
        resolve("some/old", "tokenizer", hub, tmp_path)


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("gpt2-bse", "nearest known names are gpt2-base"),
        ("cpm1-large", "give a folder"),
        ("./gone", "not a folder"),
        ("a/b/c", "not a folder"),
        ("", "not a folder"),
        ("no/body", r"no/body could not be fetched .*OSError: 404: no no/body. Name a folder"),
    ],
)
def test_other_names_are_explained(tmp_path, name, complaint):
    with pytest.raises(IdentifierError, match=complaint):
        resolve(name, "model", Hub(tmp_path), tmp_path / "cache")


def on_ranks(root, wanted):
    hub = Hub(root, **{"openai-community__gpt2": "config.json model.safetensors"})
    found = []
    for name in wanted:
        if name == "only here":
            name = str(root if bmt.rank() == 1 else root / "gone")  # noqa: PLW2901
        try:
            found.append(resolve(name, "model", hub, root / "cache"))
        except IdentifierError as error:
            found.append(f"error: {error}")
    return found


def test_one_process_fetches_and_a_failure_is_one_of_all(tmp_path):
    """The others read what it has fetched; after a failure too."""
    wanted = ["gpt2-base", "no/body", "nobody", "only here", "gpt2"]
    for first, *failures, last in run_ranks(on_ranks, 3, tmp_path, wanted):
        assert first == last == str(tmp_path / "openai-community--gpt2")
        assert all(text.startswith("error: ") and "not a folder" in text for text in failures)
    log = Hub(tmp_path).log
    assert log[0] == "0 fetch openai-community/gpt2"
    assert sorted(log[1:3]) == ["1 cache openai-community/gpt2", "2 cache openai-community/gpt2"]
    assert {line for line in log if "fetch" in line} == {
        "0 fetch openai-community/gpt2",
        "0 fetch no/body",
    }


@pytest.mark.parametrize("has_answer", [False, True])
def test_a_hub_that_does_not_answer(has_answer, tmp_path, monkeypatch):
    """Is asked once and not waited for; one that answers that there is no such name is believed."""
    said = []

    def model_info(self, repository, *, timeout):
        said.append((repository, timeout))
        if has_answer:
            response: Any = types.SimpleNamespace(headers={}, request=None)
            raise RepositoryNotFoundError("404: there is none", response=response)
        raise TimeoutError("timed out")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", model_info)
    reason = (
        "RepositoryNotFoundError: 404: there is none"
        if has_answer
        else "ConnectionError: the hub does not answer .TimeoutError: timed out., and nothing of it"
    )
    with pytest.raises(IdentifierError, match=f"no/such could not be fetched .*{reason}"):
        resolve("no/such", "config", cache=tmp_path)
    assert said == [("no/such", ANSWER)]
