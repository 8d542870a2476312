"""Where models depart from the layer that ModelCenter's arguments describe."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerVariant:
    """What no argument of ModelCenter says.

    Attributes:
        out_bias: whether `attention_out` has a bias; None for as the other maps.
        head_norm_eps: eps of an RMS norm of every head's queries and keys, before rotary positions
            (Qwen3); None for no norm.
        norms_input: whether the first layer normalises what enters it; OPT-350m has its norms
            behind each part, and none behind its embeddings.
    """

    out_bias: bool | None = None
    head_norm_eps: float | None = None
    norms_input: bool = True

    def of_layer(self, place: int) -> LayerVariant:
        """The variant of the layer at this place of a stack."""
        return self if place == 0 else dataclasses.replace(self, norms_input=True)


PLAIN = LayerVariant()
