"""From names to folders, with a client in place of the hub."""

from __future__ import annotations

import dataclasses
import fnmatch
import pathlib
from collections.abc import Sequence

import pytest
from tests.ranks.runner import run_ranks

import bmtrain as bmt
from model_center.errors import IdentifierError
from model_center.hub.identifiers import LOCAL_ONLY, REPOSITORIES
from model_center.hub.resolving import resolve

README = """
bert-base-cased bert-large-cased bert-base-uncased bert-large-uncased bert-base-chinese bert-base-multilingual-cased kv-plm
cpm1-large cpm2-large roberta-base roberta-large t5-small t5-base t5-large t5-3b t5-11b t5-v1_1-small t5-v1_1-base t5-v1_1-large
t5-v1_1-xl t5-v1_1-xxl mt5-small mt5-base mt5-large mt5-xl mt5-xxl mengzi-t5-base flan-t5-small flan-t5-base flan-t5-large
flan-t5-xl flan-t5-xxl gpt2-base gpt2-medium gpt2-large gpt2-xl wenzhong-gpt2-3.5b gptj-6b lawformer glm-10b-zh
vit-base-patch16-224 vit-base_patch16_224
"""


@dataclasses.dataclass
class Hub:
    """A hub in a folder: repositories are folders below it, "org--name"; its cache is another."""

    root: pathlib.Path
    files: dict[str, tuple[str, ...]]

    @property
    def log(self) -> list[str]:
        path = self.root / "log"
        return path.read_text().splitlines() if path.exists() else []

    def __call__(self, repository: str, patterns: Sequence[str], local_only: bool) -> str:
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


def names(folder: str) -> set[str]:
    return {path.name for path in pathlib.Path(folder).iterdir()}


def test_every_name_of_the_documents_is_known() -> None:
    for name in README.split():
        assert (name in REPOSITORIES) != (name in LOCAL_ONLY), name


def test_a_folder_wins(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(tmp_path, {"openai-community/gpt2": ("config.json",)})
    assert resolve(str(tmp_path), "model", hub) == str(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2-base").mkdir()
    assert resolve("gpt2-base", "config", hub) == "gpt2-base"
    assert not hub.log


def test_the_old_cache_is_used_where_it_has_the_files(tmp_path: pathlib.Path) -> None:
    hub, cache = (
        Hub(tmp_path, {"google-t5/t5-base": ("config.json", "spiece.model")}),
        tmp_path / "cache",
    )
    (cache / "t5-base").mkdir(parents=True)
    (cache / "t5-base" / "pytorch_model.pt").touch()
    (cache / "cpm1-large").mkdir()
    (cache / "cpm1-large" / "config.json").touch()
    assert resolve("t5-base", "model", hub, cache) == str(cache / "t5-base")
    assert resolve("cpm1-large", "config", hub, cache) == str(cache / "cpm1-large")
    assert names(resolve("t5-base", "tokenizer", hub, cache)) == {"config.json", "spiece.model"}


def test_only_what_is_asked_for_is_fetched_and_safetensors_if_there_are_any(
    tmp_path: pathlib.Path,
) -> None:
    both = (
        "config.json",
        "model.safetensors",
        "pytorch_model.bin",
        "flax_model.msgpack",
        "vocab.txt",
        "model.fp16.safetensors",
    )
    hub = Hub(
        tmp_path,
        {
            "google-bert/bert-base-cased": both,
            "some/old": ("config.json", "pytorch_model-00001-of-00002.bin"),
        },
    )
    assert names(resolve("bert-base-cased", "config", hub, tmp_path)) == {"config.json"}
    assert names(resolve("bert-base-cased", "model", hub, tmp_path)) == {
        "config.json",
        "model.safetensors",
        "vocab.txt",  # it goes into what the model writes
    }
    assert names(resolve("some/old", "model", hub, tmp_path)) == {
        "config.json",
        "pytorch_model-00001-of-00002.bin",
    }
    with pytest.raises(
        IdentifierError, match=r"some/old has no tokenizer files: expected any of vocab\.json"
    ):
        resolve("some/old", "tokenizer", hub, tmp_path)


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("gpt2-bse", "nearest known names are gpt2-base"),
        ("cpm1-large", "give a folder"),
        ("./gone", "no folder"),
        ("/not/there", "no folder"),
        ("a/b/c", "no folder"),
        ("", "no folder"),
        ("no/body", r"no/body could not be fetched .*OSError: 404: no no/body$"),
    ],
)
def test_other_names_are_explained(tmp_path: pathlib.Path, name: str, complaint: str) -> None:
    with pytest.raises(IdentifierError, match=complaint):
        resolve(name, "model", Hub(tmp_path, {}), tmp_path / "cache")


def on_ranks(root: str, name: str) -> str:
    hub = Hub(pathlib.Path(root), {"openai-community/gpt2": ("config.json", "model.safetensors")})
    if name == "only here":
        name = str(root) if bmt.rank() == 1 else str(pathlib.Path(root) / "gone")
    try:
        return resolve(name, "model", hub, pathlib.Path(root) / "cache")
    except IdentifierError as error:
        return f"error: {error}"


def test_one_process_fetches_and_the_others_read(tmp_path: pathlib.Path) -> None:
    found = run_ranks(on_ranks, 3, str(tmp_path), "gpt2-base")
    assert set(found) == {str(tmp_path / "openai-community--gpt2")}
    log = Hub(tmp_path, {}).log
    assert log[0] == "0 fetch openai-community/gpt2"
    assert sorted(log[1:]) == ["1 cache openai-community/gpt2", "2 cache openai-community/gpt2"]


@pytest.mark.parametrize("name", ["no/body", "nobody", "only here"])
def test_a_failure_is_one_of_all_ranks(tmp_path: pathlib.Path, name: str) -> None:
    for message in run_ranks(on_ranks, 2, str(tmp_path), name):
        assert message.startswith("error: ") and "no folder" in message
