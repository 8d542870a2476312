"""A folder of a model is the old one or the new one, whenever its writer is killed."""

from __future__ import annotations

import functools
import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import pytest

from model_center.weights import staging
from model_center.weights.staging import Staging

OLD = {
    "config.json": "1",
    "model-00001-of-00002.safetensors": "1",
    "model.safetensors.index.json": "1",
}
NEW = {"config.json": "2", "model.safetensors": "2", "tokenizer.json": "2"}
OTHERS = {"notes.txt": "mine"}
KILLED = 9


def fill(folder: pathlib.Path, *parts: dict[str, str]) -> pathlib.Path:
    folder.mkdir()
    for part in parts:
        for name, content in part.items():
            (folder / name).write_text(content)
    return folder


def found(folder: pathlib.Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir() if path.is_file()}


def save(folder: pathlib.Path) -> None:
    one = Staging(folder)
    for name, content in NEW.items():
        one.path(name).write_text(content)
    one.commit()


def killed_at(count: int, program: Callable[[], None]) -> bool:
    """Whether a process that runs it is killed before its `count`-th call that Python tells of."""
    child = os.fork()
    if child == 0:
        left = [count]

        def hook(event: str, args: tuple[Any, ...]) -> None:
            if event.startswith(("os.", "open", "shutil.", "ctypes.")):
                left[0] -= 1
                if left[0] < 0:
                    os._exit(KILLED)

        try:
            sys.addaudithook(hook)
            program()
        except BaseException:
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, KILLED)
    return code == KILLED


def test_a_kill_leaves_the_old_or_the_new(tmp_path: pathlib.Path) -> None:
    """Also the next program that saves there leaves nothing behind."""
    seen = []
    count = 0
    while True:
        folder = fill(tmp_path / str(count), OLD, OTHERS)
        is_killed = killed_at(count, functools.partial(save, folder))
        files = found(folder)
        assert files in (OLD | OTHERS, NEW | OTHERS), (count, files)
        seen.append(files["config.json"])
        if not is_killed:
            break
        save(folder)
        assert found(folder) == NEW | OTHERS
        assert not [name for name in os.listdir(tmp_path) if "incoming" in name]
        count += 1
    assert seen == sorted(seen) and seen[0] == "1" and seen.count("2") > 2


def test_where_folders_cannot_be_exchanged(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Old weights are never beside new ones, and a folder with a configuration is whole."""

    def refused(*paths: pathlib.Path) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(staging, "exchange", refused)
    count = 0
    while True:
        folder = fill(tmp_path / str(count), OLD, OTHERS)
        is_killed = killed_at(count, functools.partial(save, folder))
        files = found(folder)
        assert "config.json" not in files or files in (OLD | OTHERS, NEW | OTHERS)
        if not is_killed:
            break
        save(folder)
        assert found(folder) == NEW | OTHERS
        count += 1
    assert count > 10


def with_a_folder_inside(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(folder / "checkpoints", OLD)


def working_directory(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


@pytest.mark.parametrize("kind", [with_a_folder_inside, working_directory])
def test_a_folder_that_stays_the_same_one(
    kind: Callable[[pathlib.Path, pytest.MonkeyPatch], None],
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = fill(tmp_path / "out", OLD, OTHERS)
    kind(folder, monkeypatch)
    before, inside = folder.stat().st_ino, {path for path in folder.iterdir() if path.is_dir()}
    save(folder)
    assert found(folder) == NEW | OTHERS and folder.stat().st_ino == before
    assert {path for path in folder.iterdir() if path.is_dir()} == inside
    assert os.listdir(tmp_path) == ["out"]


def test_a_link_to_the_folder_stays_one(tmp_path: pathlib.Path) -> None:
    folder = fill(tmp_path / "one", OLD, OTHERS)
    folder.chmod(0o750)
    (tmp_path / "link").symlink_to(folder)
    save(tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and found(folder) == NEW | OTHERS
    assert folder.stat().st_mode & 0o777 == 0o750
    assert sorted(os.listdir(tmp_path)) == ["link", "one"]
