"""SuperGLUE for BERT."""

from model_center.dataset.bertdataset.superglue import (
    DATASET,
    BoolQ_Dataset,
    CB_Dataset,
    COPA_Dataset,
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
    "RTE_Dataset",
    "SuperGLUE",
    "WSC_Dataset",
    "WiC_Dataset",
]
