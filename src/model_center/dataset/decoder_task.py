"""SuperGLUE for models that continue a text: a prompt, and the class whose word comes next."""

from __future__ import annotations

import pathlib
from typing import ClassVar

import torch

from model_center.dataset import superglue, truncation, verbalizer
from model_center.dataset.example import Example
from model_center.dataset.line_file import LineFile
from model_center.dataset.padding import Item, one_hot
from model_center.dataset.prompts import PROMPTS, WORDS
from model_center.dataset.task_dataset import TaskDataset, TaskTable, Tokenizer, at_least


class DecoderTask(TaskDataset):
    """A SuperGLUE task for a decoder-only model; subclasses say which, and how words are written.

    Items hold `input_ids`, int64 (length,); `input_length`; `targets`, int64 (length,): the next id
    of the prompt, -100 at the end; `index`, int32 (length,): 1 at the last token, whose logits
    choose the class; and `labels`. Prompts that are too long lose their beginning. COPA's train
    split has each row twice, the second time with its choices swapped.
    """

    task: ClassVar[str]
    word_prefix: ClassVar[str] = ""

    def __init__(
        self,
        path: str | pathlib.Path,
        split: str,
        rank: int,
        world_size: int,
        tokenizer: Tokenizer,
        max_decoder_length: int,
    ) -> None:
        """Rows of at most `max_decoder_length` ids; `rank` and `world_size` have no effect.

        Raises:
            DataError: naming the file, and the line, that is missing or not of the task's format.
        """
        at_least(max_decoder_length, 2, "max_decoder_length")
        super().__init__(load(path, self.task, split), tokenizer)
        self.max_length = max_decoder_length

    @classmethod
    def get_verbalizer(cls, tokenizer: Tokenizer) -> list[int]:
        """The ids of the words that stand for the classes, in the order of the labels."""
        return verbalizer.word_ids(tokenizer, [cls.word_prefix + word for word in WORDS[cls.task]])

    @property
    def fill(self) -> dict[str, int]:
        """Pad ids for ids, -100 for targets, 0 for the index."""
        return {"input_ids": self.pad_id, "targets": -100}

    def encode(self, example: Example) -> Item:
        """The prompt of an example."""
        ids = truncation.keep_end(
            self.tokenizer, PROMPTS[self.task](example.fields), self.max_length
        )
        return {
            "input_ids": torch.tensor(ids),
            "input_length": torch.tensor(len(ids)),
            "targets": torch.tensor([*ids[1:], -100]),
            "index": one_hot(len(ids) - 1, len(ids)),
        }


def load(path: str | pathlib.Path, task: str, split: str) -> LineFile:
    """The examples of a split, COPA's train split both ways round."""
    return superglue.examples(path, task, split, both_ways=task == "COPA" and split == "train")


def tasks_of(kind: type[TaskDataset]) -> TaskTable:
    """SuperGLUE's tasks as classes `<task>_Dataset`, to be named so in the module of `kind`."""
    said = f"SuperGLUE's task of this name, a {kind.__name__}."
    facts = {"__module__": kind.__module__, "__doc__": said}
    return TaskTable(
        {
            task: type(f"{task}_Dataset", (kind,), {"task": task, **facts})
            for task in superglue.TASKS
        }
    )
