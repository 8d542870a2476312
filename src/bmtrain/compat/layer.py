"""`bmtrain.layer`: `DistributedModule` and `DistributedParameter` of shard/."""

from bmtrain.shard.module import DistributedModule
from bmtrain.shard.parameter import DistributedParameter

__all__ = ["DistributedModule", "DistributedParameter"]
