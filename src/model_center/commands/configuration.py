"""Flags of a command in a file, `--config run.yaml`, and a run's flags in its folder."""

from __future__ import annotations

import argparse
import enum
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from bmtrain.runtime.arguments import with_nearest
from model_center.errors import ConfigError
from model_center.optional import package
from model_center.weights.staging import write_whole

FILE, ADAPTERS = "run.yaml", "adapter_config.json"
UNSAID = (
    *("run", "config", "look", "local_rank", "ranks", "dataset_name", "resume", "replay_step"),
    "continue_with_other_data",
)


def words_of(arguments: Sequence[str], parser: argparse.ArgumentParser) -> list[str]:
    """The arguments with the flags of a `--config FILE` in its place, before all others.

    A key is a flag without its dashes; true is the flag alone, a list several values, null a flag
    that is not given.

    Raises:
        ConfigError: for a file that cannot be read, and a key that is no flag.
    """
    known = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    known.add_argument("--config")
    found, rest = known.parse_known_args(arguments)
    if found.config is None:
        return list(arguments)
    content = _read(pathlib.Path(found.config))
    actions = {
        flag.lstrip("-").replace("-", "_"): action
        for action in parser._actions  # noqa: SLF001 (argparse lists them nowhere else)
        for flag in action.option_strings
    }
    words: list[str] = []
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name not in actions:
            raise ConfigError(f"{found.config} has {with_nearest(str(key), actions)}: no flag.")
        flag = next(word for word in actions[name].option_strings if word.startswith("--"))
        if isinstance(actions[name], argparse.BooleanOptionalAction) and value is False:
            words.append(f"--no-{flag[2:]}")
        elif isinstance(value, bool):
            words += [flag] if value else []
        elif isinstance(actions[name], argparse.BooleanOptionalAction):
            continue  # "auto", which is what it is without the flag
        elif value is not None:
            words += [flag, *map(str, value if isinstance(value, list) else [value])]
    # the command's own name stays first
    begin = next((n for n, word in enumerate(rest) if word.startswith("-")), len(rest))
    return [*rest[:begin], *words, *rest[begin:]]


def differences(args: argparse.Namespace, folder: pathlib.Path) -> list[str]:
    """What of the flags differs from those that a run's folder keeps, in words."""
    path = folder / FILE
    if not path.is_file():
        return []
    before, now = _read(path), given_flags(args)
    return [
        f"{name} was {before.get(name)} and is {now.get(name)}"
        for name in sorted({*before, *now})
        if before.get(name) != now.get(name)
    ]


def keep(args: argparse.Namespace, folder: pathlib.Path) -> None:
    """Write the flags into a run's folder, as `--config` reads them."""
    yaml = package("yaml", "--config", ConfigError, name="pyyaml")
    folder.mkdir(parents=True, exist_ok=True)
    text = "# python -m model_center train --config of this file\n" + yaml.safe_dump(
        given_flags(args)
    )
    write_whole(folder / FILE, text)


def given_flags(args: argparse.Namespace) -> dict[str, Any]:
    """The flags by name, as values of YAML, without those that are not given."""
    return {
        name: _plain(value)
        for name, value in sorted(vars(args).items())
        if name not in UNSAID and value not in (None, (), [])
    }


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, tuple):
        return ",".join(map(str, value)) if all(isinstance(v, str) for v in value) else list(value)
    return value


def _read(path: pathlib.Path) -> Mapping[str, Any]:
    yaml = package("yaml", "--config", ConfigError, name="pyyaml")
    try:
        content = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read as YAML: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds {type(content).__name__}: expected flags and values.")
    return content


def model_in(name: str) -> tuple[str, str | None]:
    """The model that a name means, and the adapters: of a run's folder, what the run has made.

    Raises:
        ConfigError: for adapters that name no model.
    """
    folder = pathlib.Path(name)
    if folder.is_file() and folder.name == "config.json":
        return str(folder.parent), None
    if (folder / "config.json").is_file() or not folder.is_dir():
        return name, None
    if (folder / "model" / "config.json").is_file():
        return str(folder / "model"), None
    for place in (folder, folder / "adapter"):
        if (place / ADAPTERS).is_file():
            base = _read(place / ADAPTERS).get("base_model_name_or_path")
            if not isinstance(base, str):
                raise ConfigError(f"{place / ADAPTERS} names no base_model_name_or_path: add it.")
            return base, str(place)
    return name, None
