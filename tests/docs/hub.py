"""Tiny models under the names of real ones, in a cache like that of the hub's client."""

import os

import huggingface_hub.constants
from tests.training.lm_programs import tiny

from model_center.hub.identifiers import repository_of

REVISION = "0" * 40
# Names that the pages use, and the family of the tiny model that stands for each.
MODELS = {
    "bert-base-uncased": "bert",
    "bert-large-cased": "bert",
    "gpt2-base": "gpt2",
    "t5-base": "t5",
    "meta-llama/Llama-3.2-1B": "llama",
    "meta-llama/Llama-3.1-8B": "llama",
    "meta-llama/Llama-3.1-8B-Instruct": "llama",
    "Qwen/Qwen3-0.6B": "qwen3",
    "Qwen/Qwen3-8B": "qwen3",
    "Qwen/Qwen2.5-0.5B": "qwen2",
}


def fill(cache):
    """Make the cache."""
    models = cache.with_name("models")
    models.mkdir()
    for name, family in MODELS.items():
        repository = cache / f"models--{repository_of(name).replace('/', '--')}"
        (repository / "refs").mkdir(parents=True, exist_ok=True)
        (repository / "refs" / "main").write_text(REVISION, "utf-8")
        snapshots = repository / "snapshots"
        snapshots.mkdir(exist_ok=True)
        if not (snapshots / REVISION).exists():
            (snapshots / REVISION).symlink_to(tiny(family, models), target_is_directory=True)


def use(cache):
    """Let this process see that cache and no network.

    As HF_HUB_CACHE and HF_HUB_OFFLINE would, had they been set before the client was imported.
    """
    os.environ.update({"HF_HUB_CACHE": cache, "HF_HUB_OFFLINE": "1"})  # for its own processes
    huggingface_hub.constants.HF_HUB_CACHE = cache
    huggingface_hub.constants.HF_HUB_OFFLINE = True
