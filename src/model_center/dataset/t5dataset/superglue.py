"""SuperGLUE and SQuAD for T5, from `DATASET[task](path, split, rank, world_size, tokenizer,
max_encoder_length, ...)`.

SuperGLUE's items hold `enc_input`, int32 (max_encoder_length,), and `dec_input`, int32
(max_decoder_length,), padded with 0; `enc_length` and `dec_length`, int32 (), without the padding;
`index`, int32 (max_decoder_length,); and `targets`, int64 (), the class. The decoder reads the pad
id, which starts every answer, and `<extra_id_0>`, where `index` is 1: the logits there choose the
class. SQuAD's: see `squad`.
"""

from __future__ import annotations

import functools
import pathlib
from typing import ClassVar

from model_center.dataset import decoder_task
from model_center.dataset.decoder_task import tasks_of
from model_center.dataset.padding import Item, count, one_hot, padded
from model_center.dataset.prompts import PROMPTS, WORDS
from model_center.dataset.protocols import Example
from model_center.dataset.squad import SQuAD_Dataset
from model_center.dataset.task_dataset import TaskDataset, Tokenizer, at_least, token_id, word_ids


class SuperGLUE(TaskDataset):
    """A SuperGLUE task for T5: prompts end with `<extra_id_0>.`; their last ids are kept."""

    task: ClassVar[str]
    target_key = "targets"
    lengths: ClassVar = {
        "enc_input": "enc_length",
        "dec_input": "dec_length",
        "index": "dec_length",
    }

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
        """Rows of at most `max_encoder_length` ids.

        Args:
            path: the folder that holds a folder for each task, or the task's own.
            split: "train", "dev" or "test".
            rank: accepted, and of no effect: DistributedDataLoader divides the rows.
            world_size: as `rank`.
            tokenizer: of the model.
            max_encoder_length: of a prompt, at least 4.
            max_decoder_length: of the decoder's ids, at least 2.

        Raises:
            DataError: naming the file, and the line, that is missing or not of the task's format;
                when an item is asked for, for a tokenizer without sentinels.
        """
        at_least(max_encoder_length, 4, "max_encoder_length")
        at_least(max_decoder_length, 2, "max_decoder_length")
        super().__init__(decoder_task.load(path, self.task, split), tokenizer)
        self.max_length, self.max_decoder_length = max_encoder_length, max_decoder_length

    @classmethod
    def get_verbalizer(cls, tokenizer: Tokenizer) -> list[int]:
        """The ids in `tokenizer` of the words for the classes, in the order of the labels."""
        return word_ids(tokenizer, WORDS[cls.task])

    @functools.cached_property
    def answer(self) -> list[int]:
        """What the decoder reads before it writes a class."""
        return [self.tokenizer.pad_token_id or 0, token_id(self.tokenizer, "<extra_id_0>")]

    def encode(self, example: Example) -> Item:
        """The prompt of an example, and the start of its answer."""
        prompt = f"{PROMPTS[self.task](example.fields)} <extra_id_0>."
        ids = self.tokenizer.encode(prompt)[-self.max_length :]
        return {
            "enc_input": padded(ids, self.max_length),
            "enc_length": count(len(ids)),
            "dec_input": padded(self.answer, self.max_decoder_length),
            "dec_length": count(len(self.answer)),
            "index": one_hot(len(self.answer) - 1, self.max_decoder_length),
        }


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
DATASET["SQuAD"] = SQuAD_Dataset
