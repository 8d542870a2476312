"""`bmtrain.inspect.model`: `inspect_model` of inspect/parameters.py, for all kinds of modules."""

from bmtrain.inspect.parameters import inspect_model

inspect_block = inspect_pipeline_transformer_block_list = inspect_model

__all__ = ["inspect_block", "inspect_model", "inspect_pipeline_transformer_block_list"]
