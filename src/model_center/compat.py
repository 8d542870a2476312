"""ModelCenter's import paths, `from model_center.model.basemodel import BaseModel` for example.

Modules of this project that have such a path have the old names themselves. The others are here:
`MODULES` says where their names are defined now, and `OldPaths` makes a module when a program
imports it, so that nothing is loaded which is not asked for.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence

Homes = dict[str, str]

OUTPUTS = "ModelOutput BaseModelOutput BaseModelOutputWithPooling Seq2SeqModelOutput"
CONFIGS = "Bert CPM1 CPM2 CPM3 GLM GPT2 GPTj Llama Longformer OPT Roberta T5 Vit"
TOKENIZERS = "Bert GPT2 GPTj Llama OPT Roberta T5"
SUPERGLUE = (
    "BoolQ_Dataset CB_Dataset COPA_Dataset DATASET MultiRC_Dataset ReCoRD_Dataset RTE_Dataset "
    "SuperGLUE WiC_Dataset WSC_Dataset"
)
PATHS = "check_web_and_convert_path"
CPM_PARTS = "WordpieceTokenizer convert_to_unicode is_contain_chinese is_contain_point load_vocab"

# Old module: for each module where its names are now, those names, `old=new` where they are called
# otherwise. All are below `model_center`. What a module of ModelCenter imports from another one is
# among its names: programs take names from where they find them.
MODULES: dict[str, Homes] = {
    "model.basemodel": {
        "config.base": "Config",
        "model.base": "BaseModel",
        "model.outputs": OUTPUTS,
        "utils": PATHS,
    },
    "model.config.config": {"config.base": "Config", "utils": PATHS},
    **{
        f"model.config.{name.lower()}_config": {"model": f"{name}Config", "config.base": "Config"}
        for name in CONFIGS.split()
    },
    "tokenizer.base_tokenizer": {"tokenizer.by_identifier": "BaseTokenizer", "utils": PATHS},
    **{
        f"tokenizer.{name.lower()}_tokenizer": {
            "tokenizer": f"{name}Tokenizer",
            "tokenizer.by_identifier": "BaseTokenizer",
        }
        for name in TOKENIZERS.split()
    },
    **{
        f"tokenizer.{name.lower()}_tokenizer": {
            "tokenizer": f"{name}Tokenizer",
            "tokenizer.word_pieces": CPM_PARTS,
            "utils": PATHS,
        }
        for name in ("CPM1", "CPM2")
    },
    "tokenizer.glm_tokenizer": {"tokenizer": "GLMTokenizer", "utils": PATHS},
    "dataset.cpm1.cpm1_dataset": {
        "dataset": "MMapIndexedDataset",
        "dataset.cpm1": "CPM1_Dataset CPM1_Dataset_Merge",
    },
    "dataset.cpm2.dataset": {"dataset": "MMapIndexedDataset", "dataset.cpm2": "CPM2_Dataset"},
    "dataset.cpm2.cpm2_dataset": {"dataset": "MMapIndexedDataset", "dataset.cpm2": "CPM2_Dataset"},
    "dataset.distributed_dataset": {
        "dataset": "DistributedDataset SimpleDataset build_dataset DatasetBuilder=build_dataset",
        "dataset.block_meta": "FileInfo",
        "dataset.block_writer": "DatasetWriter",
    },
    "dataset.distributed_loader": {"dataset": "DistributedDataLoader"},
    **{
        f"dataset.{kind}dataset.superglue": {f"dataset.{kind}dataset": SUPERGLUE}
        for kind in ("gpt2", "llama")
    },
    "dataset.t5dataset.squad": {"dataset.squad": "SQuAD_Dataset"},
    "dataset.utils": {
        "dataset": "SimpleDataset build_dataset compact_dataset mask_dataset shuffle_dataset",
        "dataset.block_meta": "FileInfo",
    },
    "layer.attention": {
        "layer.dense_attention": "Attention",
        "layer.sparse_attention": "SparseSelfAttention",
    },
    "utils.net_utils": {"utils": "check_web_and_convert_path"},
    "utils.print_utils": {"utils": "print_inspect"},
}


class OldPaths(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds and makes the modules of `MODULES`."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        """What Python asks for a module that no folder has."""
        package, _, name = fullname.partition(".")
        is_old = package == "model_center" and name in MODULES
        return importlib.machinery.ModuleSpec(fullname, self) if is_old else None

    def exec_module(self, module: types.ModuleType) -> None:
        """Put the names into the new module."""
        homes = MODULES[module.__name__.removeprefix("model_center.")]
        names = vars(module)
        for home, wanted in homes.items():
            found = vars(importlib.import_module(f"model_center.{home}"))
            for name in wanted.split():
                old, _, now = name.partition("=")
                names[old] = found[now or old]
        names["__doc__"] = f"Names of {', '.join(f'model_center.{home}' for home in homes)}."
        wanted_names = " ".join(homes.values()).split()
        names["__all__"] = sorted(name.partition("=")[0] for name in wanted_names)


def make_importable() -> None:
    """Let Python find the old paths, after all that is found in folders."""
    sys.meta_path.append(OldPaths())
