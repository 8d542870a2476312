"""Small random models by name."""

import torch
from tests.models import parity
from tests.models.parity import values

import model_center.model as models

SIZES = values("vocab_size=61 dim_model=16 num_heads=2 dim_head=8 dim_ff=20 dtype=float32")
IMAGES = values(
    "img_size=6 patch_size=2 hidden_size=18 num_heads=3 mlp_size=20 num_layers=1 dtype=float32"
)
DEPTHS = "num_encoder_layers=1 num_decoder_layers=2"
MORE = {
    "GLM": "num_layers=2 sop_tok_id=58 eop_tok_id=59 mask_tok_id=60",
    "GPTj": "num_layers=2 pos_rotary_dim=4",
    "CPM2": DEPTHS,
    "CPM3": "num_layers=2 prompt_types=15 prompt_length=3 segment_types=4",
    "Longformer": "num_layers=2 attention_window=4",
    "T5": DEPTHS,
}


def config(name, **options):
    """A configuration of the class of this name."""
    if name == "ViT":
        return models.VitConfig(**IMAGES | options)
    return getattr(models, f"{name}Config")(
        **SIZES | values(MORE.get(name, "num_layers=2")) | options
    )


def model(name, *, std=0.2, **options):
    """A model of the class of this name in evaluation mode, every parameter drawn anew."""
    torch.manual_seed(0)
    return parity.randomized(getattr(models, name)(config(name, **options)), std=std)
