"""Small random models by name."""

from typing import Any

import torch
from tests.models import parity

import model_center.model as models

SIZES: dict[str, Any] = {"vocab_size": 61, "dim_model": 16, "num_heads": 2, "dim_head": 8}
SIZES |= {"dim_ff": 20, "dtype": "float32"}
IMAGES: dict[str, Any] = {"img_size": 6, "patch_size": 2, "hidden_size": 18, "num_heads": 3}
IMAGES |= {"mlp_size": 20, "num_layers": 1, "dtype": "float32"}
LAYERS = {"num_layers": 2}
DEPTHS = {"num_encoder_layers": 1, "num_decoder_layers": 2}
MORE = {
    "GLM": LAYERS | {"sop_tok_id": 58, "eop_tok_id": 59, "mask_tok_id": 60},
    "GPTj": LAYERS | {"pos_rotary_dim": 4},
    "CPM2": DEPTHS,
    "CPM3": LAYERS | {"prompt_types": 15, "prompt_length": 3, "segment_types": 4},
    "Longformer": LAYERS | {"attention_window": 4},
    "T5": DEPTHS,
}


def config(name, **options):
    """A configuration of the class of this name."""
    if name == "ViT":
        return models.VitConfig(**IMAGES | options)
    return getattr(models, f"{name}Config")(**SIZES | MORE.get(name, LAYERS) | options)


def model(name, *, std=0.2, **options):
    """A model of the class of this name in evaluation mode, every parameter drawn anew."""
    torch.manual_seed(0)
    return parity.randomized(getattr(models, name)(config(name, **options)), std=std)
