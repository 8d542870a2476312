"""Files of transformers' models under the names of their parameters, and loading them.

transformers saves many models under names, and in pieces, other than those of its parameters:
experts that a model holds as one tensor are a tensor each in the file. Its own tables and
operations undo that here, tensor by tensor and when values are asked for.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import os
import pathlib
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from bmtrain.checkpoint import LoadResult
from bmtrain.checkpoint.loading import load_from
from bmtrain.checkpoint.source import Header, Source
from bmtrain.checkpoint.sources import Collected, open_source
from bmtrain.errors import CheckpointError
from bmtrain.shard.layout import round_up

KEPT = 4  # converted tensors that are kept while their parts are read: one for each reading thread


def load_transformers(
    model: torch.nn.Module,
    file_name: str | os.PathLike[str],
    strict: bool = True,
    *,
    only: Collection[str] | None = None,
) -> LoadResult:
    """`bmtrain.load` for a model of transformers: names and shapes that are not the model's are
    converted as `from_pretrained` does. Collective.

    Each rank reads its own slices; where tensors are cut or joined, all that a slice is made of.

    Args:
        model: of transformers, wrapped or not; any other is loaded as `bmtrain.load` does.
        file_name, strict, only: as of `bmtrain.load`.

    Raises:
        CheckpointError: on every rank, as `bmtrain.load`, and for tensors that cannot be converted.
    """
    return load_from(
        lambda shapes: as_parameters(open_source(file_name), model, shapes), model, strict, only
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Group:
    """Tensors of a file from which one operation of transformers makes tensors of the model.

    Attributes:
        converter: a `WeightConverter` of transformers that has no tensors yet.
        target: the model's name for what it makes, the first if there are several.
        names: the file's names for each of the converter's patterns, in order.
        model: of transformers; some operations ask for its shapes and configuration.
        is_stack: whether slice i of the result, along dim 0, is made from name i of every pattern
            and nothing else.
    """

    converter: Any
    target: str
    names: Mapping[str, Sequence[str]]
    model: Any
    is_stack: bool

    def make(
        self, values: Callable[[str], torch.Tensor], index: int | None = None
    ) -> dict[str, torch.Tensor]:
        """The model's tensors, by name, or slice `index` of a stack, with one row in dim 0.

        Args:
            values: gives the tensor for a name of the file.
        """
        converter = copy.deepcopy(self.converter)
        for pattern, names in self.names.items():
            for name in names if index is None else names[index : index + 1]:
                converter.add_tensor(self.target, name, pattern, values(name))
        made = converter.convert(self.target, model=self.model, config=self.model.config)
        return {
            name: value[0] if isinstance(value, list) else value for name, value in made.items()
        }


class Converted(Source):
    """What transformers makes of tensors of a file, under the names of the model's parameters.

    A slice of a stack of experts is read alone; of other conversions all that goes into them is.

    Args:
        source: the file.
        groups: of its tensors.

    Attributes:
        first: the first name in the file of what each tensor is made of.
    """

    def __init__(self, source: Source, groups: Sequence[Group]) -> None:
        self._source = source
        self._groups: dict[str, Group] = {}
        self.first: dict[str, str] = {}
        headers: dict[str, Header] = {}
        for group in groups:
            for name, made in _try(group, source).items():
                self._groups[name] = group
                self.first[name] = next(iter(group.names.values()))[0]
                headers[name] = Header(tuple(made.shape), made.dtype)
        super().__init__(source.path, headers, {})
        self._lock = threading.Lock()
        self._made = functools.lru_cache(KEPT)(self._make)

    def file_of(self, name: str) -> pathlib.Path:
        return self._source.file_of(self.first[name])

    def part(self, name: str, start: int, stop: int) -> torch.Tensor:
        group, shape = self._groups[name], self.headers[name].shape
        if not group.is_stack:
            return self._result(group, name, None)[start:stop]
        size = torch.Size(shape[1:]).numel()
        first, last = (start // size, round_up(stop, size) // size) if stop > start else (0, 1)
        slices = [self._result(group, name, index) for index in range(first, last)]
        values = torch.cat(slices) if len(slices) > 1 else slices[0]
        return values[start - first * size : stop - first * size]

    def mapped(self, name: str) -> torch.Tensor:
        return self._groups[name].make(self._source.mapped)[name]

    def _result(self, group: Group, name: str, index: int | None) -> torch.Tensor:
        """A tensor, or a slice of it, flattened."""
        # The parts of a tensor are read by several threads: each would convert all of it.
        with self._lock:
            return self._made(group, index)[name]

    def _make(self, group: Group, index: int | None) -> dict[str, torch.Tensor]:
        made = group.make(self._source.mapped, index)
        return {name: value.reshape(-1) for name, value in made.items()}


def _try(group: Group, source: Source) -> dict[str, torch.Tensor]:
    """What the group makes of tensors without values.

    Raises:
        CheckpointError: naming what cannot be converted.
    """

    def empty(name: str) -> torch.Tensor:
        header = source.headers[name]
        return torch.empty(header.shape, dtype=header.dtype, device="meta")

    try:
        return group.make(empty)
    except (RuntimeError, ValueError, IndexError, KeyError, AttributeError) as error:
        names = [name for several in group.names.values() for name in several]
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise CheckpointError(
            f"{source.file_of(names[0])}: {names[0]!r}{more} cannot be converted to "
            f"{group.target!r}, as transformers reads it: {error}"
        ) from error


def as_parameters(
    source: Source, model: torch.nn.Module, shapes: Mapping[str, tuple[int, ...]]
) -> Source:
    """The source under the names of the model, if that is one of transformers.

    Another model's source is returned as it is, and one in which the model's tensors lie under
    their own names, as `save` writes them.

    Args:
        shapes: of the model's tensors, by name.

    Raises:
        CheckpointError: for tensors that cannot be converted.
    """
    modeling = sys.modules.get("transformers.modeling_utils")
    tables = sys.modules.get("transformers.conversion_mapping")
    loading = sys.modules.get("transformers.core_model_loading")
    # A model of transformers has imported all of them, versions before 5 have not the last two.
    if modeling is None or tables is None or loading is None:
        return source
    is_fitting = all(shapes.get(name) == header.shape for name, header in source.headers.items())
    if is_fitting or not isinstance(model, modeling.PreTrainedModel):
        return source
    stored, groups = _conversion(source, model, shapes, tables, loading)
    if not groups and all(ours == name for ours, name in stored.items()):
        return source
    converted = Converted(source, groups)
    found: dict[str, tuple[Source, str]] = {ours: (source, name) for ours, name in stored.items()}
    found |= {name: (converted, name) for name in converted.headers}
    # In the order of the file, in which tensors are read.
    order = {name: place for place, name in enumerate(source.headers)}
    first = stored | converted.first
    places = {name: found[name] for name in sorted(found, key=lambda name: order[first[name]])}
    return Collected(source.path, places, source.others)


def _conversion(
    source: Source, model: Any, shapes: Mapping[str, tuple[int, ...]], tables: Any, loading: Any
) -> tuple[dict[str, str], list[Group]]:
    """Find for each tensor of the file what transformers makes of it: the file's name of each that
    is used as it is, by the model's (those that the model does not have under their own, for the
    messages about them), and the groups of all others.
    """
    transforms = tables.get_model_conversion_mapping(model)
    renamings = [item for item in transforms if isinstance(item, loading.WeightRenaming)]
    converters = [item for item in transforms if isinstance(item, loading.WeightConverter)]
    by_pattern = {pattern: item for item in converters for pattern in item.source_patterns}
    known = dict.fromkeys(shapes, True)
    unused: dict[str, str] = {}
    renamed: dict[str, str] = {}
    collected: dict[str, tuple[Any, dict[str, list[str]]]] = {}
    # The order in which transformers goes through a file: experts by number.
    for name in sorted(source.headers, key=loading.dot_natural_key):
        ours, pattern = loading.rename_source_key(
            name, renamings, converters, model.base_model_prefix, known
        )
        if ours not in shapes and name in shapes:
            ours, pattern = name, None
        if ours not in shapes or ours in renamed or (pattern is None and ours in collected):
            unused[name] = name
        elif pattern is None:
            renamed[ours] = name
        else:
            _, names = collected.setdefault(
                ours, (by_pattern[pattern], collections.defaultdict(list))
            )
            names[pattern].append(name)
    groups = [
        Group(converter, ours, names, model, _is_stack(converter, names, shapes[ours], loading))
        for ours, (converter, names) in collected.items()
    ]
    return {**unused, **renamed}, groups


def _is_stack(
    converter: Any, names: Mapping[str, Sequence[str]], shape: Sequence[int], loading: Any
) -> bool:
    """Whether slices of the result, along dim 0, are made of one tensor of each pattern."""
    first, *others = converter.operations
    return (
        isinstance(first, loading.MergeModulelist)
        and first.dim == 0
        and len(converter.target_patterns) == 1
        and all(isinstance(item, loading.Concatenate) and item.dim > 0 for item in others)
        and {len(several) for several in names.values()} == {shape[0]}
    )
