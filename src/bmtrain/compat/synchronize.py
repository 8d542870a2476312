"""`bmtrain.synchronize`: functions of distributed/results.py and shard/whole.py.

The attribute `bmtrain.synchronize` is the function of that name, not this module.
"""

from bmtrain.distributed.results import sum_loss, synchronize, wait_loader
from bmtrain.shard.whole import gather_result

__all__ = ["gather_result", "sum_loss", "synchronize", "wait_loader"]
