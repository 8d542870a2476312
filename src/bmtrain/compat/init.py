"""`bmtrain.init`: `init_distributed` and `is_initialized` of runtime/world.py, `topology` of
runtime/topology.py.
"""

from bmtrain.runtime.topology import Topology as topology
from bmtrain.runtime.world import init_distributed, is_initialized

__all__ = ["init_distributed", "is_initialized", "topology"]
