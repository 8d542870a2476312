"""Which class a config.json belongs to."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from model_center.errors import ConfigError
from model_center.model.base import BaseModel
from model_center.model.bert import Bert
from model_center.model.glm import GLM
from model_center.model.gpt2 import GPT2
from model_center.model.gptj import GPTj
from model_center.model.llama import Llama
from model_center.model.longformer import Longformer
from model_center.model.mistral import Mistral
from model_center.model.opt import OPT
from model_center.model.qwen2 import Qwen2
from model_center.model.qwen3 import Qwen3
from model_center.model.roberta import Roberta
from model_center.model.t5 import T5
from model_center.model.vit import ViT

# By the model_type of Hugging Face; some types are one class of ours.
CLASSES: dict[str, type[BaseModel]] = {
    "bert": Bert,
    "glm": GLM,
    "gpt2": GPT2,
    "gptj": GPTj,
    "llama": Llama,
    "longformer": Longformer,
    "mistral": Mistral,
    "opt": OPT,
    "qwen2": Qwen2,
    "qwen3": Qwen3,
    "roberta": Roberta,
    "t5": T5,
    "mt5": T5,
    "vit": ViT,
}


def model_class(content: Mapping[str, Any]) -> type[BaseModel]:
    """The class for the content of a Hugging Face config.json.

    Raises:
        ConfigError: for content without a type, or of one that is not known.
    """
    kind = content.get("model_type")
    if not isinstance(kind, str):
        raise ConfigError("the configuration names no model_type: name the class of the model.")
    if kind not in CLASSES:
        near = difflib.get_close_matches(kind, CLASSES, n=1)
        hint = f"; nearest: {near[0]!r}" if near else ""
        raise ConfigError(
            f"model_type is {kind!r}: expected one of {', '.join(sorted(CLASSES))}{hint}."
        )
    return CLASSES[kind]
