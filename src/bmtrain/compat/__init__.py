"""BMTrain's import paths, `from bmtrain.block_layer import Block` for example.

`NAMES` says where the names of each path are defined now, `REMOVED` what to use instead of those
that are no more. A module of the library that has an old path (`bmtrain.utils`,
`bmtrain.optim.adam`, `bmtrain.nn.linear`) has the old names itself.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any

from bmtrain.compat.functions import Removed

# An old module, where its names are now, and these; `old=new` where they are called otherwise. All
# is below `bmtrain`.
NAMES = """
block_layer               block.block           Block CheckpointBlock
block_layer               block.stack           TransformerBlockList
block_layer               utils                 round_up
debug                     compat.functions      DEBUG_VARS clear=debug_clear set=debug_set
debug                     compat.functions      get=debug_get append=debug_append
debug                     compat.functions      extend=debug_extend
distributed.ops           distributed.autograd  all_gather all_reduce broadcast reduce_scatter
distributed.ops           distributed.autograd  recv_activations send_activations
distributed.ops           distributed.nccl      NCCLCommunicator commCount commRank
distributed.ops           compat.functions      OpAllGather OpAllReduce OpBroadcast
distributed.ops           compat.functions      OpReduceScatter
global_var                runtime.config        ConfigMap=Config config
global_var                runtime.world         rank world_size
init                      runtime.topology      topology=Topology
init                      runtime.world         init_distributed is_initialized
inspect.format            inspect.statistics    format_summary
inspect.model             inspect.parameters    inspect_model inspect_block=inspect_model
inspect.model             inspect.parameters   inspect_pipeline_transformer_block_list=inspect_model
inspect.tensor            inspect.tensors       InspectTensor=Inspector inspect_tensor
inspect.tensor            inspect.tensors       record_tensor
inspect.tensor            inspect.tensors       InspectTensorManager=inspect_tensor
layer                     shard.module          DistributedModule
layer                     shard.parameter       DistributedParameter
loss._function            compat.functions      has_inf_nan
lr_scheduler.cosine       lr_scheduler.decays   Cosine
lr_scheduler.exponential  lr_scheduler.decays   Exponential
lr_scheduler.linear       lr_scheduler.decays   Linear
lr_scheduler.no_decay     lr_scheduler.decays   NoDecay
lr_scheduler.noam         lr_scheduler.decays   Noam
nn.column_parallel_linear nn.parallel_linear    ColumnParallelLinear
nn.parallel_embedding     nn.embedding          VPEmbedding
nn.parallel_linear_func   nn.parallel_linear    OpParallelLinear ReduceType
nn.row_parallel_linear    nn.parallel_linear    RowParallelLinear
optim.adam_offload        optim.offload         AdamOffloadOptimizer
optim.optim_manager       optim.manager         OptimManager
optim.optim_manager       compat.functions      check_overflow grad_rescale
param_init                block.wrapper         init_parameters
param_init                shard.listing         grouped_parameters
param_init                compat.functions      init_distributed_parameter iterate_parameters
parameter                 shard.parameter       DistributedParameter ParameterInitializer
parameter                 compat.functions      OpAllGather=OpGather
pipe_layer                parallel.pipeline     PipelineTransformerBlockList
store                     checkpoint            load save
store                     compat.functions      allgather_objects
store                     compat.functions      allgather_object=allgather_objects
store                     compat.functions      broadcast_object _save_to_rank0=save_to_rank0
synchronize               distributed.results   sum_loss synchronize wait_loader
synchronize               shard.whole           gather_result
wrapper                   block.wrapper         BMTrainModelWrapper
wrapper                   block.wrapper         make_distributed=BMTrainModelWrapper
wrapper                   block.wrapper         model_wrapper_dispatch=BMTrainModelWrapper
"""

# By module: names, and what does it now. They can be imported; using one raises RemovedError.
REMOVED = {
    "block_layer": {
        "CheckpointBlockContext": "a block gathers its parameters while it runs; outside of a pass "
        "read one by parameter.gather(), all by state_dict().",
        "storage_type_cuda": "memory is made by shape, dtype and device: "
        "torch.empty(n, dtype=dtype, device=bmtrain.device()).",
    },
    "distributed.ops": {
        "send_meta recv_meta": "send_activations and recv_activations carry shape and dtype along."
    },
    "hook_func": {
        "zero_pre_forward zero_post_forward zero_pre_backward zero_post_backward PreHookFunc "
        "PostHookFunc OneStepNoGradFunc": "Block(module) gathers, releases and reduces by itself."
    },
    "loss._function": {
        "cross_entropy_forward cross_entropy_backward_inplace fused_sumexp fused_softmax_inplace": (
            "bmtrain.loss.FusedCrossEntropy computes the loss and its gradient."
        )
    },
    "pipe_layer": {
        "PipePreFunction PipePostFunction StagePreFunction StagePostFunction": (
            "PipelineTransformerBlockList moves activations and gradients between stages by itself "
            "(distributed/stages.py)."
        )
    },
    "store": {
        "DistributedStateDictWrapper DistributedTensorWrapper": "load_state_dict takes whole "
        "tensors on every rank, and bmtrain.load(model, file) reads a file slice by slice.",
        "async_save_to_file": "bmtrain.save(model, file, non_blocking=True) writes in the "
        "background.",
    },
    "zero_context": {
        "ZeroContext": "Block(module) gathers, releases and reduces by itself; parameter.gather() "
        "gives one tensor."
    },
}


class OldPaths(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds and makes modules.

    Args:
        contents: by the name of the module, its names and their values.
    """

    def __init__(self, contents: dict[str, dict[str, Any]]) -> None:
        self._contents = contents

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        """What Python asks for a module that no folder has."""
        is_old = fullname in self._contents
        return importlib.machinery.ModuleSpec(fullname, self) if is_old else None

    def exec_module(self, module: types.ModuleType) -> None:
        """Put the names into the new module."""
        vars(module).update(self._contents[module.__name__])


def make_importable() -> None:
    """Make the modules of these tables, and set them as attributes, as importing BMTrain does."""
    contents: dict[str, dict[str, Any]] = {}
    for line in NAMES.strip().splitlines():
        path, home, *names = line.split()
        found = vars(importlib.import_module(f"bmtrain.{home}"))
        for name in names:
            old, _, now = name.partition("=")
            contents.setdefault(f"bmtrain.{path}", {})[old] = found[now or old]
    for path, removed in REMOVED.items():
        for several, remedy in removed.items():
            for name in several.split():
                facts = {"__qualname__": f"bmtrain.{path}.{name}", "remedy": remedy}
                placeholder = Removed(name, (), {**facts, "__doc__": f"Not here: {remedy}"})
                contents.setdefault(f"bmtrain.{path}", {})[name] = placeholder
    for path, own in contents.items():
        own["__all__"] = sorted(name for name in own if not name.startswith("_"))
        own["__doc__"] = f"BMTrain's `{path}`: bmtrain.compat says where its names are now."
    sys.meta_path.append(OldPaths(contents))
    sys.modules["bmtrain.nccl"] = importlib.import_module("bmtrain.distributed.nccl")
    for path in contents:
        parent, _, last = path.rpartition(".")
        package = vars(sys.modules[parent])
        # The import replaces an attribute of the same name: `bmtrain.synchronize` stays a function.
        before = package.get(last)
        module = importlib.import_module(path)
        package[last] = module if before is None else before
