"""Prompts of SuperGLUE for models that continue a text: the answer's word comes next."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Fields = Mapping[str, Any]


def boolq(fields: Fields) -> str:
    """Passage and question; No or Yes."""
    return f"{fields['passage']}. {fields['question']}?"


def entailment(fields: Fields) -> str:
    """CB and RTE: premise and hypothesis; No, Yes (or Maybe)."""
    return (
        f"Sentence 1: {fields['premise']} Sentence 2: {fields['hypothesis']} Does sentence "
        "1 entails sentence 2?"
    )


def copa(fields: Fields) -> str:
    """Both choices and the premise; 1 or 2."""
    return (
        f"Choice 1: {fields['choice1']} Choice 2: {fields['choice2']} "
        f"{copa_question(fields)} was choice"
    )


def copa_question(fields: Fields) -> str:
    """What is asked about COPA's premise."""
    return f'The {fields["question"]} of "{fields["premise"]}"'


def wic(fields: Fields) -> str:
    """Two sentences and the word; No or Yes."""
    sentences = f"Sentence 1: {fields['sentence1']} Sentence 2: {fields['sentence2']}"
    return (
        f"{sentences} Does the word {fields['word']} in sentence 1 express the same "
        "meaning as in sentence 2?"
    )


def wsc(fields: Fields) -> str:
    """A text, the pronoun and the noun; No or Yes."""
    return f"{fields['text']} Does {fields['span2_text']} refers to {fields['span1_text']}?"


def multirc(fields: Fields) -> str:
    """A text, a question and one of its answers; No or Yes."""
    return (
        f'{fields["text"]} Is answer "{fields["answer"]}" the answer to the question '
        f'"{fields["question"]}"?'
    )


def record(fields: Fields) -> str:
    """A text, a query, all entities and the one that is asked for; No or Yes."""
    asked = (
        f"Question: {fields['query']} Entities: {fields['entities']} Which entities can be "
        "filled in the placeholder?"
    )
    return f"{fields['text']} {asked} Is it {fields['entity']}?"


# The prompt of each task, and the words of its classes in the order of the labels.
PROMPTS: dict[str, Callable[[Fields], str]] = {
    "BoolQ": boolq,
    "CB": entailment,
    "COPA": copa,
    "MultiRC": multirc,
    "ReCoRD": record,
    "RTE": entailment,
    "WiC": wic,
    "WSC": wsc,
}
WORDS: dict[str, tuple[str, ...]] = dict.fromkeys(PROMPTS, ("No", "Yes")) | {
    "CB": ("No", "Yes", "Maybe"),
    "COPA": ("1", "2"),
}
