"""The model."""

from models.gpt import GPT, TransformerBlock

__all__ = ["GPT", "TransformerBlock"]
