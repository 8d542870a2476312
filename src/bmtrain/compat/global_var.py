"""`bmtrain.global_var`: `config` of runtime/config.py, `rank`, `world_size` of runtime/world.py."""

from bmtrain.runtime.config import Config as ConfigMap
from bmtrain.runtime.config import config
from bmtrain.runtime.world import rank, world_size

__all__ = ["ConfigMap", "config", "rank", "world_size"]
