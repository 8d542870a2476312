"""The machine of a forecast: GPUs by name, hosts, and what a process takes beside its tensors.

Peaks and bandwidths are those of the makers' data sheets (dense bf16; memory of the GPU; one
direction of the link between GPUs of a host); memory is what the driver leaves to programs.
"""

from __future__ import annotations

import dataclasses

from bmtrain.errors import ConfigurationError
from bmtrain.recompute.memory import MARGIN
from bmtrain.runtime.arguments import POSITIVE, SIZE, check, unknown

GIB = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu:
    """A kind of GPU.

    Attributes:
        memory: GiB that programs can take.
        flops: dense products of 16-bit numbers a second.
        bandwidth: of its memory, bytes a second.
        link: bytes a second to another GPU of the host, in one direction.
        source: where the figures are from.
    """

    memory: float
    flops: float
    bandwidth: float
    link: float
    source: str


def _gpu(memory: float, tera: float, gigabytes: float, link: float, name: str) -> Gpu:
    source = f"NVIDIA's data sheet of the {name}"
    return Gpu(
        memory=memory, flops=tera * 1e12, bandwidth=gigabytes * 1e9, link=link * 1e9, source=source
    )


GPUS = {
    "a10g": _gpu(22.0, 70, 600, 32, "A10G"),
    "a100-40": _gpu(39.4, 312, 1555, 300, "A100 40GB"),
    "a100": _gpu(79.2, 312, 2039, 300, "A100 80GB SXM"),
    "a800": _gpu(79.2, 312, 2039, 200, "A800 80GB"),
    "b200": _gpu(178.0, 2250, 8000, 900, "B200"),
    "h20": _gpu(95.0, 148, 4000, 450, "H20"),
    "h100-pcie": _gpu(79.2, 756, 2000, 64, "H100 PCIe"),
    "h100": _gpu(79.2, 989, 3350, 450, "H100 SXM"),
    "h800": _gpu(79.2, 989, 3350, 200, "H800"),
    "h200": _gpu(139.8, 989, 4800, 450, "H200 SXM"),
    "l40s": _gpu(44.4, 362, 864, 32, "L40S"),
    "rtx3090": _gpu(23.7, 71, 936, 32, "GeForce RTX 3090"),
    "rtx4090": _gpu(23.6, 165, 1008, 32, "GeForce RTX 4090"),
}
# A GPU whose memory alone is known: time is not forecast.
UNKNOWN = Gpu(memory=0.0, flops=0.0, bandwidth=0.0, link=0.0, source="given by hand")
# Bytes a second of a host's network, for each of its GPUs: 400 Gbit/s, as clusters of these have.
NETWORK = 50e9
# Bytes beside torch's allocator, the same for every model. CONTEXT: the CUDA context with the code
# of loaded libraries. COMMUNICATION: buffers of NCCL's communicators, and the mappings of other
# ranks' memory. Both are what `cudaMemGetInfo` showed beyond reserved and shared memory on one
# H200, and on two and four: see docs/log.md.
CONTEXT = int(0.8 * GIB)
COMMUNICATION = int(1.6 * GIB)
# The caching allocator keeps blocks that do not fit the next request: reserved beyond allocated
# memory, as a share of the latter, and at least.
SLACK, LEAST_SLACK = 0.025, int(0.5 * GIB)
# Of a host's memory, for the system, Python and data loading: in all, and for each process.
HOST_SYSTEM, HOST_PROCESS = 4 * GIB, 4 * GIB


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """Hosts with GPUs, all of one kind.

    Args:
        gpus: of each host.
        hosts: how many.
        gpu: a name of GPUS; None where only the memory is known.
        gpu_memory: GiB of each GPU; None for that of the kind.
        host_memory: GiB of each host; None if unknown.

    Raises:
        ConfigurationError: for an unknown GPU, no memory, or numbers that are not positive.
    """

    gpus: int = 1
    hosts: int = 1
    gpu: str | None = None
    gpu_memory: float | None = None
    host_memory: float | None = None

    def __post_init__(self) -> None:
        check("plan", gpus=(self.gpus, SIZE), hosts=(self.hosts, SIZE))
        if self.gpu is not None and self.gpu not in GPUS:
            raise ConfigurationError(
                f"{unknown('plan', [self.gpu], GPUS)} Expected one of {', '.join(GPUS)}, or "
                "the memory of a GPU alone (gpu_memory, --gpu-memory)."
            )
        if self.gpu is None and self.gpu_memory is None:
            raise ConfigurationError(
                "plan needs the GPU's kind (gpu, --gpu h200) or its memory (gpu_memory, "
                "--gpu-memory 80)."
            )
        for name in ("gpu_memory", "host_memory"):
            value = vars(self)[name]
            if value is not None:
                check("plan", **{name: (value, POSITIVE)})

    @property
    def kind(self) -> Gpu:
        """Its GPU."""
        return UNKNOWN if self.gpu is None else GPUS[self.gpu]

    @property
    def world_size(self) -> int:
        """Processes: one for each GPU."""
        return self.gpus * self.hosts

    @property
    def memory(self) -> int:
        """Bytes of a GPU."""
        return int((self.kind.memory if self.gpu_memory is None else self.gpu_memory) * GIB)

    @property
    def room(self) -> int:
        """Bytes of a GPU that a run may take: what `use_checkpoint="auto"` would."""
        return int(self.memory * (1 - MARGIN))
