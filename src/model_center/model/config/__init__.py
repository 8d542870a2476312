"""All configuration classes, under the path where ModelCenter has them."""

from model_center.config.base import Config
from model_center.model.bert import BertConfig
from model_center.model.cpm1 import CPM1Config
from model_center.model.cpm2 import CPM2Config
from model_center.model.cpm3 import CPM3Config
from model_center.model.glm import GLMConfig
from model_center.model.gpt2 import GPT2Config
from model_center.model.gptj import GPTjConfig
from model_center.model.llama import LlamaConfig
from model_center.model.longformer import LongformerConfig
from model_center.model.mistral import MistralConfig
from model_center.model.opt import OPTConfig
from model_center.model.qwen2 import Qwen2Config
from model_center.model.qwen3 import Qwen3Config
from model_center.model.roberta import RobertaConfig
from model_center.model.t5 import T5Config
from model_center.model.vit import VitConfig

__all__ = [
    "BertConfig",
    "Config",
    "CPM1Config",
    "CPM2Config",
    "CPM3Config",
    "GLMConfig",
    "GPT2Config",
    "GPTjConfig",
    "LlamaConfig",
    "LongformerConfig",
    "MistralConfig",
    "OPTConfig",
    "Qwen2Config",
    "Qwen3Config",
    "RobertaConfig",
    "T5Config",
    "VitConfig",
]
