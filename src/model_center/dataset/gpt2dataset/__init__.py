"""SuperGLUE for GPT-2 and its kin, from `DATASET[task](path, split, rank, world_size, tokenizer,
max_decoder_length)`.

What items hold: see DecoderTask.
"""

from __future__ import annotations

from model_center.dataset.decoder_task import DecoderTask, tasks_of


class SuperGLUE(DecoderTask):
    """Words of classes are written after a space, as they come in a text."""

    word_prefix = " "


DATASET = tasks_of(SuperGLUE)
(
    BoolQ_Dataset,
    CB_Dataset,
    COPA_Dataset,
    MultiRC_Dataset,
    ReCoRD_Dataset,
    RTE_Dataset,
    WiC_Dataset,
    WSC_Dataset,
) = DATASET.values()
