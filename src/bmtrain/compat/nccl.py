"""`bmtrain.nccl`: the module distributed/nccl.py itself, so that both names mean one module."""

import sys

from bmtrain.distributed import nccl

sys.modules[__name__] = nccl
