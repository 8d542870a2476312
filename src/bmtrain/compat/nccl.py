"""`bmtrain.nccl`: the module distributed/nccl.py itself, under both paths."""

import sys

from bmtrain.distributed import nccl

sys.modules[__name__] = nccl
