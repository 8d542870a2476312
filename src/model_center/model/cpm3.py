"""CPM-3 (OpenBMB, 2022): CPM-1 with segments, and with prompts that are trained."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from model_center.config.base import RELATIVE
from model_center.errors import ConfigError, InputError
from model_center.layer.embedding import Embedding
from model_center.layer.position_embedding.segment import SegmentPositionEmbedding
from model_center.model.cpm1 import CPM1, CPM1Config
from model_center.model.decoding import Decoding
from model_center.model.inputs import embedded


@dataclasses.dataclass(kw_only=True)
class CPM3Config(CPM1Config):
    """Configuration of CPM3; defaults are ModelCenter's.

    Attributes:
        prompt_types, prompt_length: number of prompts and tokens in each: each has rows of a table
            of their own.
        segment_types: number of segments.
        absolute_inner_segment: see SegmentPositionEmbedding.
        max_exact_rate, max_distance_rate: how buckets of distances grow; other than the defaults
            are an error.
    """

    OWN_ARGUMENTS: ClassVar[tuple[str, str, str, str]] = (
        "",
        RELATIVE,
        "prompt_types prompt_length segment_types max_exact_rate max_distance_rate "
        "absolute_inner_segment",
        "",
    )

    vocab_size: int = 30720
    dim_model: int = 4096
    num_heads: int = 64
    dim_ff: int = 10240
    num_layers: int = 32
    emb_init_std: float = 1.0
    att_init_std: float = 1.0
    ffn_init_std: float = 1.0
    proj_init_std: float = 1.0
    position_bias_num_buckets: int = 512
    position_bias_max_distance: int = 2048
    length_scale: bool = True
    attn_scale: bool = True
    tied: bool = True
    prompt_types: int = 32
    prompt_length: int = 64
    segment_types: int = 34
    absolute_inner_segment: bool = True
    max_exact_rate: float = 0.25
    max_distance_rate: float = 1.0

    def __post_init__(self) -> None:
        """As in TransformerConfig; the rates have one value."""
        super().__post_init__()
        if (self.max_exact_rate, self.max_distance_rate) != (0.25, 1.0):
            raise ConfigError(
                f"max_exact_rate={self.max_exact_rate} and "
                f"max_distance_rate={self.max_distance_rate}: only 0.25 and 1.0 are known."
            )

    def relative(self, *, bidirectional: bool) -> dict[str, Any]:
        """Arguments of the SegmentPositionEmbedding of this configuration."""
        of_segments = {
            "num_segments": self.segment_types,
            "absolute_inner_segment": self.absolute_inner_segment,
        }
        return super().relative(bidirectional=bidirectional) | of_segments


class CPM3(CPM1):
    """The language model CPM-3.

    `token_type_ids` are segments, where a learned number per pair replaces the distance.
    """

    _CONFIG_TYPE = CPM3Config
    HAD_CONTEXT_THIRD = True
    PER_TOKEN: ClassVar[Mapping[str, int | None]] = {**CPM1.PER_TOKEN, "token_type_ids": None}

    def add_embeddings(self, config: CPM1Config) -> None:
        """Make the embeddings of ids, first those of prompts."""
        rows = self.config.prompt_types * self.config.prompt_length
        self.prompt_embedding = Embedding(rows, config.dim_model, **config.embedding())
        super().add_embeddings(config)

    def add_positions(self, config: CPM1Config) -> None:
        """Make `position_bias`."""
        self.position_bias = SegmentPositionEmbedding(**config.relative(bidirectional=True))

    def embed(
        self, input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None, start: int
    ) -> torch.Tensor:
        """As in CPM1, but the first `prompt_length` ids of a text are rows of the table of prompts.

        Raises:
            InputError: for a text that is shorter than that.
        """
        size = self.config.prompt_length
        if input_ids is None or inputs_embeds is not None or start > 0:
            return super().embed(input_ids, inputs_embeds, start)
        if input_ids.shape[-1] < size:
            raise InputError(
                f"input_ids has shape {tuple(input_ids.shape)}: expected {size} ids of the "
                "prompt first."
            )
        prompt = embedded(input_ids[..., :size], inputs_embeds, self.prompt_embedding)
        return torch.cat([prompt, self.input_embedding(input_ids[..., size:])], 1)

    @property
    def shortest_prompt(self) -> int:
        """The ids of the prompt and one more."""
        return int(self.config.prompt_length) + 1

    def decoding(
        self, input_ids: torch.Tensor, mask: torch.Tensor | None, inputs: Mapping[str, torch.Tensor]
    ) -> Decoding:
        """As in CausalModel; numbers outside of the tables raise an error on all ranks."""
        rows = self.prompt_embedding.num_embeddings
        check_at_most(
            "the prompt, the first ids of input_ids,",
            input_ids[:, : self.config.prompt_length],
            rows - 1,
        )
        check_at_most(
            "token_type_ids",
            inputs.get("token_type_ids", input_ids[:0]),
            self.config.segment_types - 1,
        )
        return super().decoding(input_ids, mask, inputs)

    def mask_arguments(self, mask: torch.Tensor) -> dict[str, Any]:
        """As in CausalModel; padding follows the prompt's ids, which come first in every row."""
        return {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}

    def bias(
        self, positions: torch.Tensor, segments: torch.Tensor | None, start: int
    ) -> torch.Tensor:
        """As in CPM1, by segments (batch, keys) too; all of them one segment if None."""
        of_queries = None if segments is None else segments[:, start:]
        out: torch.Tensor = self.position_bias(
            positions, positions[..., start:], segments, of_queries
        )
        return out


def check_at_most(name: str, values: torch.Tensor, most: int) -> None:
    """Demand numbers from 0 to `most`.

    Raises:
        InputError: naming one that is not.
    """
    strange = values[(values < 0) | (values > most)]
    if len(strange):
        raise InputError(f"{name} has {int(strange[0])}: expected 0 to {most}.")
