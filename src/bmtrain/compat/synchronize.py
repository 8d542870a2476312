"""`bmtrain.synchronize`: the functions of distributed/results.py. `bmtrain.synchronize()` itself is the first of them."""

from bmtrain.distributed.results import gather_result, sum_loss, synchronize, wait_loader

__all__ = ["gather_result", "sum_loss", "synchronize", "wait_loader"]
