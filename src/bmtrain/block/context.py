"""What the blocks of a run share; each block gets it in its constructor."""

from __future__ import annotations

import functools
import weakref
from typing import Any

from bmtrain.compile.programs import Programs
from bmtrain.recompute.offload import Host
from bmtrain.recompute.planner import Planners
from bmtrain.recompute.recomputation import Scripts
from bmtrain.runtime.world import World
from bmtrain.shard.engine import Engine
from bmtrain.shard.parting import Sameness
from bmtrain.shard.recording import Recorder


class Context:
    """Services of the run that blocks need. One per run, from `world.service(Context)`."""

    def __init__(self, world: World) -> None:
        self.device, self.mesh, self.defaults = world.device, world.mesh, world.defaults
        self.draws = world.draws
        self.engine = world.service(Engine)
        self.recorder = world.service(Recorder)
        self.planners = world.service(Planners)
        self.programs = world.service(Programs)
        self.sameness = world.service(Sameness)
        self.scripts = world.service(Scripts)
        #: inside a call whose gradients may be differentiated, which compiled code cannot
        self.runs_eagerly = False
        #: models that have run as one graph
        self.whole: weakref.WeakSet[Any] = weakref.WeakSet()
        self.kept: set[str] = set()  # classes of which a warning says that they keep activations
        #: host memory for inputs of blocks; created on first use, because it makes streams
        self.pinned = functools.partial(world.service, Host)

    def __deepcopy__(self, memo: dict[int, Any]) -> Context:
        """Returns itself: a copy of a block belongs to the same run."""
        return self
