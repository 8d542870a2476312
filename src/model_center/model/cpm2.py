"""CPM-2 (Zhang et al., "CPM-2: Large-scale Cost-effective Pre-trained Language Models", 2021)."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from model_center.layer.embedding import Embedding
from model_center.model.seq2seq import Seq2SeqConfig, Seq2SeqModel


@dataclasses.dataclass(kw_only=True)
class CPM2Config(Seq2SeqConfig):
    """Configuration of CPM2; defaults are ModelCenter's.

    `length_scale` is not for the embedding.
    """

    POSITIONS: ClassVar[int | None] = 33
    POSITIONS_END: ClassVar[str] = (
        " The 34th is cls_head in ModelCenter to 0.1.3 and tied from 0.1.5 on."
    )

    vocab_size: int = 26240
    dim_ff: int = 1920
    ffn_activate_fn: str = "gated_gelu"
    tied: bool = False


class CPM2(Seq2SeqModel):
    """The encoder-decoder CPM-2: T5 of another size, trained on Chinese and English."""

    _CONFIG_TYPE = CPM2Config

    def __init__(self, config: CPM2Config) -> None:
        super().__init__(
            config,
            Embedding(
                config.vocab_size, config.dim_model, **config.embedding() | {"length_scale": False}
            ),
        )
