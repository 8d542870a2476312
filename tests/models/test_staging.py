"""A folder of a model is the old one or the new one, whenever its writer is killed."""

import functools
import os
import sys

import pytest
from tests.flushes import recorded_flushes

from model_center.weights import staging
from model_center.weights.staging import Staging

OLD = dict.fromkeys(
    ("config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json"), "1"
)
NEW = dict.fromkeys(("config.json", "model.safetensors", "tokenizer.json"), "2")
OTHERS = {"notes.txt": "mine"}
KILLED = 9


def fill(folder):
    folder.mkdir()
    for name, content in (OLD | OTHERS).items():
        (folder / name).write_text(content)
    return folder


def found(folder):
    return {path.name: path.read_text() for path in folder.iterdir() if path.is_file()}


def save(folder):
    one = Staging(folder)
    for name, content in NEW.items():
        one.path(name).write_text(content)
    one.commit()


def killed_at(count, program):
    """Whether a process that runs it is killed before its `count`-th call that Python tells of."""
    child = os.fork()
    if child == 0:
        left = [count]

        def hook(event, args):
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


@pytest.mark.parametrize("is_exchanged", [True, False])
def test_a_kill_leaves_the_old_or_the_new(tmp_path, monkeypatch, is_exchanged):
    """Where folders cannot be exchanged old weights are never beside new ones, and a folder with a
    configuration is whole. The next program that saves there leaves nothing behind.
    """

    def refused(*paths):
        raise OSError(22, "Invalid argument")

    if not is_exchanged:
        monkeypatch.setattr(staging, "exchange", refused)
    seen = []
    is_killed = True
    while is_killed:
        count = len(seen)
        folder = fill(tmp_path / str(count))
        is_killed = killed_at(count, functools.partial(save, folder))
        files = found(folder)
        is_one = files in (OLD | OTHERS, NEW | OTHERS)
        assert is_one or not (is_exchanged or "config.json" in files), (count, files)
        seen.append(files.get("config.json", "1"))
        if is_killed:
            save(folder)
        assert found(folder) == NEW | OTHERS
        assert not [name for name in os.listdir(tmp_path) if "incoming" in name]
    assert seen == sorted(seen) and seen[0] == "1" and seen.count("2") > 2 and len(seen) > 10


@pytest.mark.parametrize("is_exchanged", [True, False])
def test_all_is_flushed(tmp_path, is_exchanged):
    """Files before they take their names, then the list of them."""
    folder = fill(tmp_path / "out")
    if not is_exchanged:
        (folder / "inside").mkdir()
    with recorded_flushes() as flushes:
        save(folder)
        assert all(flushes.has(folder / name) for name in NEW) and flushes.has(folder)
    moved = [] if is_exchanged else [(name, True) for name in NEW]
    assert sorted(flushes.renamed) == moved


@pytest.mark.parametrize("kind", ["with a folder inside", "working directory", "behind a link"])
def test_a_folder_that_stays_the_same_one(kind, tmp_path, monkeypatch):
    folder = fill(tmp_path / "out")
    folder.chmod(0o750)
    before, inside, target = folder.stat().st_ino, folder / "checkpoints", folder
    if kind == "with a folder inside":
        fill(inside)
    elif kind == "working directory":
        monkeypatch.chdir(folder)
    else:
        target = tmp_path / "link"
        target.symlink_to(folder)
    save(target)
    assert found(folder) == NEW | OTHERS and folder.stat().st_mode & 0o777 == 0o750
    assert inside.is_dir() == (kind == "with a folder inside")
    assert not inside.is_dir() or found(inside) == OLD | OTHERS
    assert target.is_symlink() == (target != folder)
    assert target != folder or folder.stat().st_ino == before
    assert {*os.listdir(tmp_path)} == {"out", target.name}
