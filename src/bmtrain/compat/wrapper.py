"""`bmtrain.wrapper`: `BMTrainModelWrapper` of block/wrapper.py."""

from bmtrain.block.wrapper import BMTrainModelWrapper

make_distributed = model_wrapper_dispatch = BMTrainModelWrapper

__all__ = ["BMTrainModelWrapper", "make_distributed", "model_wrapper_dispatch"]
