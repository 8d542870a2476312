"""The names that the project knows: ModelCenter's, and where Hugging Face's hub has them."""

from __future__ import annotations

import difflib
import pathlib
import re

from model_center.errors import IdentifierError

T5_SIZES = ("small", "base", "large", "xl", "xxl")
BERTS = (
    "base-cased",
    "base-uncased",
    "large-cased",
    "large-uncased",
    "base-chinese",
    "base-multilingual-cased",
)

REPOSITORIES = {
    **{f"bert-{kind}": f"google-bert/bert-{kind}" for kind in BERTS},
    **{f"roberta-{size}": f"FacebookAI/roberta-{size}" for size in ("base", "large")},
    **{f"t5-{size}": f"google-t5/t5-{size}" for size in ("small", "base", "large", "3b", "11b")},
    **{
        f"{family}-{size}": f"google/{family}-{size}"
        for family in ("t5-v1_1", "mt5", "flan-t5")
        for size in T5_SIZES
    },
    "mengzi-t5-base": "Langboat/mengzi-t5-base",
    "gpt2": "openai-community/gpt2",
    "gpt2-base": "openai-community/gpt2",
    **{f"gpt2-{size}": f"openai-community/gpt2-{size}" for size in ("medium", "large", "xl")},
    "wenzhong-gpt2-3.5b": "IDEA-CCNL/Wenzhong-GPT2-3.5B",
    "gptj-6b": "EleutherAI/gpt-j-6b",
    "lawformer": "thunlp/Lawformer",
    "glm-10b-zh": "THUDM/glm-10b-chinese",
    "vit-base-patch16-224": "google/vit-base-patch16-224",
    "vit-base_patch16_224": "google/vit-base-patch16-224",
}
# ModelCenter's own, of which the hub has no copy that is known to be the same model.
LOCAL_ONLY = ("cpm1-large", "cpm2-large", "kv-plm")

_REPOSITORY = re.compile(r"\w[\w.-]*/[\w.-]+")


def repository_of(name: str) -> str:
    """The hub's repository for a name that the project knows, or for its own, "org/name".

    Raises:
        IdentifierError: with the nearest names that are known, or that a folder is needed.
    """
    if name in REPOSITORIES:
        return REPOSITORIES[name]
    if name in LOCAL_ONLY:
        raise IdentifierError(
            f"{name!r} is not on a hub: give a folder with its config.json and pytorch_model.pt, "
            f"or put them into ~/.cache/model_center/{name}/."
        )
    if pathlib.Path(name).is_file():  # a vocabulary's, as very old programs give it
        raise IdentifierError(f"{name!r} is a file: give the folder that it is in.")
    if _REPOSITORY.fullmatch(name):
        return name
    near = difflib.get_close_matches(name, [*REPOSITORIES, *LOCAL_ONLY], n=3)
    nearest = f" The nearest known names are {', '.join(near)}." if near else ""
    raise IdentifierError(
        f"{name!r} is not a folder, a known name or a repository of the "
        f'Hugging Face hub ("organisation/name").{nearest}'
    )
