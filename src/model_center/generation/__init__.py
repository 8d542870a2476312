"""Generation: one engine for all models, greedy, sampling or beams, from ids or from texts."""

from model_center.generation.config import GenerationConfig
from model_center.generation.engine import generate, stream
from model_center.generation.search import GenerationOutput
from model_center.generation.session import Session
from model_center.generation.text import TextGenerator

__all__ = ["GenerationConfig", "GenerationOutput", "Session", "TextGenerator", "generate", "stream"]
