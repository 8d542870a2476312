"""`bmtrain.init`: names of runtime/world.py, and `topology`, the class of runtime/topology.py."""

from bmtrain.runtime.topology import Topology as topology
from bmtrain.runtime.world import init_distributed, is_initialized

__all__ = ["init_distributed", "is_initialized", "topology"]
