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
from model_center.dataset.decoder_task import tasks_of
from model_center.dataset.example import Example
from model_center.dataset.padding import Item, one_hot
from model_center.dataset.prompts import PROMPTS, WORDS
from model_center.dataset.squad import SQuAD_Dataset
from model_center.dataset.task_dataset import TaskDataset, Tokenizer, at_least


class T5Task(TaskDataset):
    """A SuperGLUE task for T5: prompts end with `<extra_id_0>.`; too long ones lose their start."""

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
        """Rows of at most `max_encoder_length` ids; `rank` and `world_size` have no effect.

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


DATASET = tasks_of(T5Task)
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
DATASET["SQuAD"] = SQuAD_Dataset
