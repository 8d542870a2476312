"""Where each tensor of a model is in a checkpoint of Hugging Face, as data."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterator, Mapping, Sequence

from model_center.errors import WeightsError

# Parts of a TransformerBlock.
ATTENTION_NORM, FFN_NORM = "self_att.layernorm_before_attention", "ffn.layernorm_before_ffn"
PROJECTIONS = tuple(f"self_att.self_attention.project_{name}" for name in "qkv")
ATTENTION_OUT, FFN_IN, FFN_OUT = (
    "self_att.self_attention.attention_out",
    "ffn.ffn.w_in.w",
    "ffn.ffn.w_out",
)


@dataclasses.dataclass(frozen=True)
class TensorPart:
    """The part of one tensor of a Hugging Face checkpoint that is one tensor of ours.

    Attributes:
        name: of theirs, with the key map's prefix where transformers' class with a head writes it.
        transpose: whether theirs is turned first: matrices of GPT-2 are (in, out), ours (out, in).
        rows: [start, stop) of dim 0 of theirs, after turning; None for all.
    """

    name: str
    transpose: bool = False
    rows: tuple[int, int] | None = None


@dataclasses.dataclass(frozen=True)
class KeyMap:
    """How names of one model's configuration correspond to those of its Hugging Face checkpoints.

    Several of our tensors may be the same piece (the two norms of GPT-J): reading gives both its
    values, writing demands that they are equal. Tensors of ours that are not listed keep their own
    names.

    Attributes:
        pieces: our full name to what it is there, for every layer.
        prefix: "transformer." for example: files have it, or, written from a class without head,
            lack it.
        ignored: regular expressions, searched in their names, of what holds no weights of ours:
            masks, inverse frequencies.
        tied: their name to the name whose tensor it is as well. Files may have either or both;
            written is what `pieces` names.
        substitutes: their name to that which is read where a file lacks it: a head with which
            transformers was not trained apart.
        new: regular expressions, matched from the start of our names, of heads that a file need not
            have: they are initialised.
    """

    pieces: Mapping[str, TensorPart]
    prefix: str = ""
    ignored: tuple[str, ...] = ()
    tied: Mapping[str, str] = dataclasses.field(default_factory=dict)
    substitutes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    new: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for pattern in (*self.ignored, *self.new):
            try:
                re.compile(pattern)
            except re.error as error:
                raise WeightsError(
                    f"the key map's pattern {pattern!r} is not a regular expression: {error}."
                ) from error

    def spellings(self, name: str) -> Iterator[str]:
        """Names that files have for their tensor: with or without prefix, TensorFlow's norms."""
        bare = name.removeprefix(self.prefix)
        for spelled in dict.fromkeys((name, bare, self.prefix + bare)):
            yield spelled
            if ".LayerNorm." in spelled:
                yield spelled.replace(".LayerNorm.weight", ".LayerNorm.gamma").replace(
                    ".LayerNorm.bias", ".LayerNorm.beta"
                )

    def same_as(self, name: str) -> list[str]:
        """Their names for the tensor that `name` is, itself first."""
        target = self.tied.get(name, name)
        return list(
            dict.fromkeys(
                (name, target, *(other for other, kept in self.tied.items() if kept == target))
            )
        )

    def found_in(self, names: Collection[str], name: str) -> list[str]:
        """Which `names` of a file are their tensor `name`, the one to read first."""
        found = [
            spelled
            for same in self.same_as(name)
            for spelled in self.spellings(same)
            if spelled in names
        ]
        if not found and name in self.substitutes:
            return self.found_in(names, self.substitutes[name])[:1]
        return found

    def is_ignored(self, name: str) -> bool:
        """Whether their tensor `name` is none of ours."""
        return any(re.search(pattern, name) for pattern in self.ignored)

    def may_be_new(self, name: str) -> bool:
        """Whether our tensor `name` may be missing from a file, and is initialised then."""
        return any(re.match(pattern, name) for pattern in self.new)


def both(ours: str, theirs: str) -> dict[str, TensorPart]:
    """Weight and bias of one part."""
    return renamed({ours: theirs})


def renamed(
    parts: Mapping[str, str],
    ours: str = "",
    theirs: str = "",
    *,
    kinds: Sequence[str] = ("weight", "bias"),
    transpose: bool = False,
) -> dict[str, TensorPart]:
    """The tensors of several parts, which have other names there.

    Args:
        parts: our name of a part to theirs.
        ours, theirs: what all of these names begin with.
        kinds: the tensors of each part.
        transpose: whether their matrices are turned.
    """
    return {
        f"{ours}{own}.{kind}": TensorPart(f"{theirs}{other}.{kind}", transpose and kind == "weight")
        for own, other in parts.items()
        for kind in kinds
    }


def packed(ours: str, theirs: str, width: int, *, transpose: bool = False) -> dict[str, TensorPart]:
    """A layer's query, key and value, which are one map there: `width` rows each."""
    return {
        f"{ours}{name}.{kind}": TensorPart(
            f"{theirs}.{kind}", transpose and kind == "weight", (place * width, (place + 1) * width)
        )
        for place, name in enumerate(PROJECTIONS)
        for kind in ("weight", "bias")
    }
