"""Interval arithmetic, and what it says of a traced step."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

COMPUTE, SIDE = 7, 20


@pytest.mark.parametrize(
    ("intervals", "expected"),
    [
        ([], []),
        ([(2, 1), (3, 3)], []),
        ([(3, 4), (0, 1)], [(0, 1), (3, 4)]),
        ([(0, 2), (1, 3)], [(0, 3)]),
        ([(0, 1), (1, 2)], [(0, 2)]),
        ([(0, 9), (1, 2), (3, 4)], [(0, 9)]),
    ],
)
def test_union(
    bench: Any, intervals: list[tuple[float, float]], expected: list[tuple[float, float]]
) -> None:
    assert bench.intervals.union(intervals) == expected


@pytest.mark.parametrize(
    ("some", "others", "expected"),
    [
        ([(0, 4)], [], []),
        ([(0, 1)], [(1, 2)], []),
        ([(0, 4)], [(1, 2), (3, 9)], [(1, 2), (3, 4)]),
        ([(0, 2), (1, 5)], [(4, 6), (0, 1)], [(0, 1), (4, 5)]),
    ],
)
def test_intersection(bench: Any, some: list[Any], others: list[Any], expected: list[Any]) -> None:
    assert bench.intervals.intersection(some, others) == expected
    assert bench.intervals.intersection(others, some) == expected


def test_against_counting_points(bench: Any) -> None:
    """On whole numbers an interval is a set of unit steps."""
    draw = random.Random(0)
    for _ in range(200):
        some, others = (
            [(begin, begin + draw.randrange(6)) for begin in draw.choices(range(40), k=6)]
            for _ in range(2)
        )
        left, right = (
            {point for begin, end in intervals for point in range(begin, end)}
            for intervals in (some, others)
        )
        assert bench.intervals.covered(some) == len(left)
        assert bench.intervals.covered(bench.intervals.intersection(some, others)) == len(
            left & right
        )


# Names as torch.profiler gave them on an H200.
@pytest.mark.parametrize(
    ("name", "category", "stream", "kind"),
    [
        ("nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNT", "kernel", COMPUTE, "matmul"),
        (
            "void "
            "cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8>",
            "kernel",
            COMPUTE,
            "matmul",
        ),
        (
            "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float>",
            "kernel",
            COMPUTE,
            "matmul",
        ),
        ("triton_tem_fused_addmm_3", "kernel", COMPUTE, "matmul"),
        (
            "void "
            "pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, "
            "128, 64>>",
            "kernel",
            COMPUTE,
            "attention",
        ),
        (
            "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_0",
            "kernel",
            COMPUTE,
            "attention",
        ),
        (
            "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel)",
            "kernel",
            COMPUTE,
            "attention",
        ),
        ("triton_red_fused_native_layer_norm_0", "kernel", COMPUTE, "elementwise and norms"),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>",
            "kernel",
            COMPUTE,
            "elementwise and norms",
        ),
        (
            "void at::native::(anonymous "
            "namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor>",
            "kernel",
            COMPUTE,
            "optimizer",
        ),
        ("adamw_kernel", "kernel", COMPUTE, "optimizer"),
        ("squares_kernel", "kernel", COMPUTE, "optimizer"),
        ("row_gradient_in_place_kernel", "kernel", COMPUTE, "elementwise and norms"),
        (
            "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
            "kernel",
            SIDE,
            "communication",
        ),
        ("sum_parts_kernel", "kernel", SIDE, "communication"),
        (
            "void c10d::symmetric_memory::barrier_kernel(unsigned int**, unsigned long, int, int)",
            "kernel",
            SIDE,
            "communication",
        ),
        (
            "void at::native::(anonymous namespace)::CatArrayBatchedCopy_contig<OpaqueType<2u>>",
            "kernel",
            COMPUTE,
            "copies",
        ),
        ("Memcpy DtoD (Device -> Device)", "gpu_memcpy", COMPUTE, "copies"),
        ("Memcpy DtoD (Device -> Device)", "gpu_memcpy", SIDE, "communication"),
        ("Memcpy PtoP (Device -> Device)", "gpu_memcpy", COMPUTE, "communication"),
        ("Memcpy HtoD (Pinned -> Device)", "gpu_memcpy", SIDE, "host copies"),
        ("Memset (Device)", "gpu_memset", COMPUTE, "copies"),
        (
            "void cudnn::fusion::compute_dot_do_o<true>(void const*, void const*)",
            "kernel",
            COMPUTE,
            "attention",
        ),
        (
            "void at::native::(anonymous namespace)::GammaBetaBackwardCUDAKernelTemplate",
            "kernel",
            COMPUTE,
            "elementwise and norms",
        ),
        ("memcpy32_post", "kernel", COMPUTE, "copies"),
        ("something new", "kernel", COMPUTE, "other"),
    ],
)
def test_kinds(bench: Any, name: str, category: str, stream: int, kind: str) -> None:
    work = bench.device_time.Work(name=name, category=category, stream=stream, begin=0.0, end=1.0)
    assert bench.device_time.kind_of(work, COMPUTE) == kind


def works(bench: Any) -> list[Any]:
    """Two steps of 2 ms each, worked out by hand; a copy inside the GPU fetches from a peer, as it
    is on a side stream.
    """
    rows = [
        ("gemm", "kernel", COMPUTE, 0, 1000),
        ("nccl", "kernel", SIDE, 500, 1500),  # 500 of 1000 hidden
        ("adam", "kernel", COMPUTE, 1800, 2000),
        ("Memcpy DtoD", "gpu_memcpy", SIDE, 1900, 2400),  # 100 of 500 hidden
        ("Memcpy DtoD", "gpu_memcpy", COMPUTE, 2600, 2700),
        ("gemm", "kernel", COMPUTE, 3000, 4000),
        ("Memset", "gpu_memset", COMPUTE, 3000, 3100),
    ]
    return [
        bench.device_time.Work(name=n, category=c, stream=s, begin=b, end=e)
        for n, c, s, b, e in rows
    ]


def test_summary(bench: Any) -> None:
    found = bench.device_time.summary(works(bench), 2)
    assert found["span"] == 2.0
    assert found["idle"] == pytest.approx((300 + 200 + 300) / 2000)
    assert found["kinds"] == {"communication": 0.75, "optimizer": 0.1, "matmul": 1.0, "copies": 0.1}
    assert found["communication"] == 0.75
    assert found["hidden"] == pytest.approx(600 / 1500)
    assert found["exposed"] == pytest.approx(900 / 2000)
    assert found["longest"][0] == ["gemm", 1.0, 2]


def test_summary_of_one_gpu(bench: Any) -> None:
    """Without communication there is nothing to hide."""
    alone = [work for work in works(bench) if work.stream == COMPUTE]
    found = bench.device_time.summary(alone, 1)
    assert found["hidden"] is None
    assert found["communication"] == 0.0
    assert found["kinds"]["matmul"] == 2.0


def test_reading_a_trace(bench: Any, tmp_path: Path) -> None:
    """Only what the device did counts: no operators, annotations, launches, or marks without a
    duration.
    """
    events = [
        {
            "ph": "X",
            "cat": "kernel",
            "name": "gemm",
            "ts": 10.5,
            "dur": 2.0,
            "args": {"stream": COMPUTE},
        },
        {
            "ph": "X",
            "cat": "gpu_memcpy",
            "name": "Memcpy PtoP",
            "ts": 12,
            "dur": 1,
            "args": {"stream": SIDE},
        },
        {
            "ph": "X",
            "cat": "gpu_user_annotation",
            "name": "nccl:all_gather",
            "ts": 0,
            "dur": 9,
            "args": {"stream": SIDE},
        },
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 9, "args": {}},
        {"ph": "i", "cat": "kernel", "name": "mark", "ts": 0, "args": {}},
        {"ph": "M", "name": "process_name", "args": {"name": "python"}},
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    work = bench.device_time.Work
    assert bench.device_time.read_trace(path) == [
        work(name="gemm", category="kernel", stream=COMPUTE, begin=10.5, end=12.5),
        work(name="Memcpy PtoP", category="gpu_memcpy", stream=SIDE, begin=12.0, end=13.0),
    ]
