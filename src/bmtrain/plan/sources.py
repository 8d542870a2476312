"""What MODEL of `python -m bmtrain plan` stands for: a function, a folder or a name."""

from __future__ import annotations

import importlib
import inspect
import pathlib
import traceback
from typing import Any

import torch
import torch.nn.functional as F

from bmtrain.errors import ConfigurationError, first_line
from bmtrain.plan.forecast import Source
from bmtrain.runtime.arguments import named_function

CONFIG = "config.json"


def of_function(name: str) -> Source:
    """What `module:function` returns: a module, or a Source.

    Raises:
        ConfigurationError: if there is no such function, it fails, or it returns something else.
    """
    function = named_function("plan", name)
    try:
        with torch.device("meta"):
            made = function()
    except Exception as error:  # whatever the user's code raises
        raise ConfigurationError(
            f"plan: {name} failed on the meta device:\n{traceback.format_exc()}"
        ) from error
    return made if isinstance(made, Source) else Source(name=name, build=function, loss=loss_of)


def of_transformers(name: str) -> Source:
    """A folder with a config.json of transformers, or a name that transformers knows.

    Raises:
        ConfigurationError: if there is no such model, or transformers is not installed.
    """
    folder = pathlib.Path(name)
    is_path = folder.exists() or name.startswith((".", "/", "~"))
    if is_path and not (folder / CONFIG).is_file():
        raise ConfigurationError(f"plan: there is no {folder / CONFIG}.")
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise ConfigurationError(
            f"plan {name} needs the package transformers ({error}): pip install transformers, or "
            "give module:function."
        ) from error
    try:
        config = transformers.AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"plan: transformers has read no config.json of {name}: {first_line(error)} Name a "
            "folder that has one, or give module:function."
        ) from error

    def build() -> torch.nn.Module:
        kinds = getattr(config, "architectures", None) or [""]
        other = transformers.AutoModelForCausalLM.from_config
        model: torch.nn.Module = getattr(transformers, kinds[0], other)(config)
        return model

    return Source(name=name, build=build, loss=loss_of)


def loss_of(model: torch.nn.Module, batch: int, seq: int) -> torch.Tensor:
    """The loss of a language model on rows of token ids, as far as its forward says how to get it.

    With an argument `labels` or `targets` it gets both; otherwise a result that is no scalar is
    taken for logits (..., classes). transformers' `use_cache` is off, as in training.

    Raises:
        ConfigurationError: if the model cannot be called so.
    """
    ids, labels = (torch.zeros(batch, seq, dtype=torch.long) for _ in range(2))
    names = list(inspect.signature(model.forward).parameters)
    extra: dict[str, Any] = {"use_cache": False} if "use_cache" in names else {}
    target = next((name for name in ("labels", "targets") if name in names), None)
    if target is not None:
        extra[target] = labels
    try:
        out = model(ids, **extra)
    except (TypeError, ValueError, RuntimeError, IndexError, AttributeError) as error:
        raise ConfigurationError(
            f"plan: {type(model).__name__} cannot be run on token ids ({batch}, {seq}): "
            f"{type(error).__name__}: {error}. Let module:function return a bmtrain.plan.Source "
            "with a loss of its own."
        ) from error
    first = out[0] if isinstance(out, tuple | list) else out
    for name in ("logits", "loss"):
        found = getattr(out, name, None)
        first = first if found is None else found
    if not isinstance(first, torch.Tensor) or not first.is_floating_point():
        raise ConfigurationError(
            f"plan: the model returned {type(out).__name__}: expected a loss or logits."
        )
    if first.dim() == 0:
        return first
    flat = first.flatten(0, -2)
    if flat.shape[0] == labels.numel():
        return F.cross_entropy(flat.float(), labels.flatten())
    return first.float().mean()
