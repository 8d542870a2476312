"""SuperGLUE for models that continue a text: a prompt, and the class whose word comes next."""

from __future__ import annotations

import pathlib
from typing import ClassVar

from model_center.dataset import superglue
from model_center.dataset.line_file import LineFile
from model_center.dataset.padding import Item, count, one_hot, padded
from model_center.dataset.prompts import PROMPTS, WORDS
from model_center.dataset.protocols import Example
from model_center.dataset.task_dataset import TaskDataset, TaskTable, Tokenizer, at_least, word_ids


class DecoderTask(TaskDataset):
    """A SuperGLUE task for a decoder-only model; subclasses say which, and how words are written.

    Items hold `input_ids`, int32 (max_decoder_length,), padded with 0; `input_length`, int32 ();
    `targets`, int64 (max_decoder_length,): the next id of the prompt, -100 at its end and in the
    padding; `index`, int32 (max_decoder_length,): 1 at the last token, whose logits choose the
    class; and `labels`, int64 (). Of prompts that are too long the last ids are kept. COPA's train
    split has each row twice, the second time with its choices swapped.
    """

    task: ClassVar[str]
    word_prefix: ClassVar[str] = ""
    lengths = dict.fromkeys(("input_ids", "targets", "index"), "input_length")

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
        return word_ids(tokenizer, [cls.word_prefix + word for word in WORDS[cls.task]])

    def encode(self, example: Example) -> Item:
        """The prompt of an example."""
        ids = self.tokenizer.encode(PROMPTS[self.task](example.fields))[-self.max_length :]
        return {
            "input_ids": padded(ids, self.max_length),
            "input_length": count(len(ids)),
            "targets": padded(ids[1:], self.max_length, -100).long(),
            "index": one_hot(len(ids) - 1, self.max_length),
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
