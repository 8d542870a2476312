"""SuperGLUE for LLaMA and its kin, from `DATASET[task](path, split, rank, world_size, tokenizer,
max_decoder_length)`.

What items hold: see DecoderTask. Words of classes are written without a space: SentencePiece adds
one itself.
"""

from __future__ import annotations

from model_center.dataset.decoder_task import DecoderTask
from model_center.dataset.task_dataset import TaskTable


class BoolQ_Dataset(DecoderTask):
    """Passage and question; No or Yes."""

    task = "BoolQ"


class CB_Dataset(DecoderTask):
    """Premise and hypothesis; No, Yes or Maybe."""

    task = "CB"


class COPA_Dataset(DecoderTask):
    """Two choices and a premise; 1 or 2."""

    task = "COPA"


class MultiRC_Dataset(DecoderTask):
    """A text, a question and one of its answers; No or Yes."""

    task = "MultiRC"


class ReCoRD_Dataset(DecoderTask):
    """A text, a query and one of its entities; No or Yes."""

    task = "ReCoRD"


class RTE_Dataset(DecoderTask):
    """Premise and hypothesis; No or Yes."""

    task = "RTE"


class WiC_Dataset(DecoderTask):
    """Two sentences and a word; No or Yes."""

    task = "WiC"


class WSC_Dataset(DecoderTask):
    """A text, a pronoun and a noun; No or Yes."""

    task = "WSC"


DATASET = TaskTable(
    BoolQ=BoolQ_Dataset,
    CB=CB_Dataset,
    COPA=COPA_Dataset,
    MultiRC=MultiRC_Dataset,
    ReCoRD=ReCoRD_Dataset,
    RTE=RTE_Dataset,
    WiC=WiC_Dataset,
    WSC=WSC_Dataset,
)
