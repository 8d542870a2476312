"""SuperGLUE and SQuAD for T5, from `DATASET[task](path, split, rank, world_size, tokenizer,
max_encoder_length, ...)`.

SuperGLUE's items hold `enc_input`, int64 (length,); `enc_length`; `dec_input`, int64 (2,): the pad
id, which starts every answer, and `<extra_id_0>`; `dec_length`, 2; `index`, int32 (2,): 1 at the
second, whose logits choose the class; and `targets`, the class. SQuAD's: see `squad`.
"""

from __future__ import annotations

import pathlib
from typing import ClassVar

import torch

from model_center.dataset import decoder_task, truncation, verbalizer
from model_center.dataset.example import Example
from model_center.dataset.padding import Item, one_hot
from model_center.dataset.prompts import PROMPTS, WORDS
from model_center.dataset.squad import SQuAD_Dataset
from model_center.dataset.task_dataset import TaskDataset, TaskTable, Tokenizer, at_least


class T5Task(TaskDataset):
    """A SuperGLUE task for T5: the prompt ends with `<extra_id_0>.`; one that is too long loses its
    beginning.
    """

    task: ClassVar[str]
    target_key = "targets"

    def __init__(
        self,
        path: str | pathlib.Path,
        split: str,
        rank: int,
        world_size: int,
        tokenizer: Tokenizer,
        max_encoder_length: int,
        max_decoder_length: int,
    ) -> None:
        """The task's rows, at most `max_encoder_length` ids each. `rank` and `world_size` have no
        effect.

        Raises:
            DataError: naming the file, and the line, that is missing or not of the task's format;
                for a tokenizer without sentinels.
        """
        at_least(max_encoder_length, 4, "max_encoder_length")
        at_least(max_decoder_length, 2, "max_decoder_length")
        super().__init__(decoder_task.load(path, self.task, split), tokenizer)
        self.max_length = max_encoder_length
        self.sentinel = verbalizer.token_id(tokenizer, "<extra_id_0>")

    @classmethod
    def get_verbalizer(cls, tokenizer: Tokenizer) -> list[int]:
        """The ids of the words that stand for the classes, in the order of the labels."""
        return verbalizer.word_ids(tokenizer, WORDS[cls.task])

    @property
    def fill(self) -> dict[str, int]:
        """Pad ids for the encoder's ids; the decoder's rows are all of one length."""
        return {"enc_input": self.pad_id}

    def encode(self, example: Example) -> Item:
        """The prompt of an example, and the start of its answer."""
        prompt = f"{PROMPTS[self.task](example.fields)} <extra_id_0>."
        ids = truncation.keep_end(self.tokenizer, prompt, self.max_length)
        return {
            "enc_input": torch.tensor(ids),
            "enc_length": torch.tensor(len(ids)),
            "dec_input": torch.tensor([self.pad_id, self.sentinel]),
            "dec_length": torch.tensor(2),
            "index": one_hot(1, 2),
        }


class BoolQ_Dataset(T5Task):
    """Passage and question; No or Yes."""

    task = "BoolQ"


class CB_Dataset(T5Task):
    """Premise and hypothesis; No, Yes or Maybe."""

    task = "CB"


class COPA_Dataset(T5Task):
    """Two choices and a premise; 1 or 2."""

    task = "COPA"


class MultiRC_Dataset(T5Task):
    """A text, a question and one of its answers; No or Yes."""

    task = "MultiRC"


class ReCoRD_Dataset(T5Task):
    """A text, a query and one of its entities; No or Yes."""

    task = "ReCoRD"


class RTE_Dataset(T5Task):
    """Premise and hypothesis; No or Yes."""

    task = "RTE"


class WiC_Dataset(T5Task):
    """Two sentences and a word; No or Yes."""

    task = "WiC"


class WSC_Dataset(T5Task):
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
    SQuAD=SQuAD_Dataset,
)
