"""The model."""

from models.gpt import GPT, TransformerBlock, rows_of_all

__all__ = ["GPT", "TransformerBlock", "rows_of_all"]
