"""SuperGLUE and SQuAD for T5."""

from model_center.dataset.squad import SQuAD_Dataset
from model_center.dataset.t5dataset.superglue import (
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
    "SQuAD_Dataset",
    "SuperGLUE",
    "WSC_Dataset",
    "WiC_Dataset",
]
