"""`bmtrain.layer`: `DistributedModule` of shard/module.py, `DistributedParameter` of
shard/parameter.py.
"""

from bmtrain.shard.module import DistributedModule
from bmtrain.shard.parameter import DistributedParameter

__all__ = ["DistributedModule", "DistributedParameter"]
