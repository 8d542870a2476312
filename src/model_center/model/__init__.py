"""Pretrained language models: a file has a configuration, a model and its key map."""

from model_center.config.base import Config
from model_center.model.base import BaseModel
from model_center.model.bert import Bert, BertConfig
from model_center.model.cpm1 import CPM1, CPM1Config
from model_center.model.cpm2 import CPM2, CPM2Config
from model_center.model.cpm3 import CPM3, CPM3Config
from model_center.model.glm import GLM, GLMConfig
from model_center.model.gpt2 import GPT2, GPT2Config
from model_center.model.gptj import GPTj, GPTjConfig
from model_center.model.llama import Llama, LlamaConfig
from model_center.model.longformer import Longformer, LongformerConfig
from model_center.model.mistral import Mistral, MistralConfig
from model_center.model.opt import OPT, OPTConfig
from model_center.model.outputs import (
    BaseModelOutput,
    BaseModelOutputWithPooling,
    ModelOutput,
    Seq2SeqModelOutput,
)
from model_center.model.qwen2 import Qwen2, Qwen2Config
from model_center.model.qwen3 import Qwen3, Qwen3Config
from model_center.model.roberta import Roberta, RobertaConfig
from model_center.model.t5 import T5, T5Config
from model_center.model.vit import ViT, VitConfig

__all__ = [
    "BaseModel",
    "BaseModelOutput",
    "BaseModelOutputWithPooling",
    "Bert",
    "BertConfig",
    "Config",
    "CPM1",
    "CPM1Config",
    "CPM2",
    "CPM2Config",
    "CPM3",
    "CPM3Config",
    "GLM",
    "GLMConfig",
    "GPT2",
    "GPT2Config",
    "GPTj",
    "GPTjConfig",
    "Llama",
    "LlamaConfig",
    "Longformer",
    "LongformerConfig",
    "Mistral",
    "MistralConfig",
    "ModelOutput",
    "OPT",
    "OPTConfig",
    "Qwen2",
    "Qwen2Config",
    "Qwen3",
    "Qwen3Config",
    "Roberta",
    "RobertaConfig",
    "Seq2SeqModelOutput",
    "T5",
    "T5Config",
    "ViT",
    "VitConfig",
]
