"""SuperGLUE for LLaMA and its kin."""

from model_center.dataset.llamadataset.superglue import (
    DATASET,
    BoolQ_Dataset,
    CB_Dataset,
    COPA_Dataset,
    MultiRC_Dataset,
    ReCoRD_Dataset,
    RTE_Dataset,
    SuperGLUE,
    WiC_Dataset,
    WSC_Dataset,
)

__all__ = [
    "BoolQ_Dataset",
    "CB_Dataset",
    "COPA_Dataset",
    "DATASET",
    "MultiRC_Dataset",
    "RTE_Dataset",
    "ReCoRD_Dataset",
    "SuperGLUE",
    "WSC_Dataset",
    "WiC_Dataset",
]
