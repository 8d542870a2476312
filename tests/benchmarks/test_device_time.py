"""Interval arithmetic, and what it says of a traced step."""

import pytest

COMPUTE, SIDE = 7, 20


# Names as torch.profiler gave them on an H200, and what is not a kernel of the compute stream.
KINDS = """
nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNT | matmul
void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8> | matmul
void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float> | matmul
triton_tem_fused_addmm_3 | matmul
void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128, 64>> | attention
cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_0 | attention
fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel) | attention
void cudnn::fusion::compute_dot_do_o<true>(void const*, void const*) | attention
triton_red_fused_native_layer_norm_0 | elementwise and norms
void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>> | elementwise and norms
row_gradient_in_place_kernel | elementwise and norms
void at::native::(anonymous namespace)::GammaBetaBackwardCUDAKernelTemplate | elementwise and norms
void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor> | optimizer
adamw_kernel | optimizer
squares_kernel | optimizer
ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>) | communication | kernel 20
sum_parts_kernel | communication | kernel 20
void c10d::symmetric_memory::barrier_kernel(unsigned int**, unsigned long, int, int) | communication | kernel 20
void at::native::(anonymous namespace)::CatArrayBatchedCopy_contig<OpaqueType<2u>> | copies
Memcpy DtoD (Device -> Device) | copies | gpu_memcpy 7
Memcpy DtoD (Device -> Device) | communication | gpu_memcpy 20
Memcpy PtoP (Device -> Device) | communication | gpu_memcpy 7
Memcpy HtoD (Pinned -> Device) | host copies | gpu_memcpy 20
Memset (Device) | copies | gpu_memset 7
memcpy32_post | copies
something new | other
"""


def test_kinds(bench):
    for line in KINDS.strip().splitlines():
        name, kind, *rest = map(str.strip, line.split(" | "))
        category, stream = (rest[0] if rest else f"kernel {COMPUTE}").split()
        work = bench.device_time.Work(
            name=name, category=category, stream=int(stream), begin=0.0, end=1.0
        )
        assert bench.device_time.kind_of(work, COMPUTE) == kind, line


def test_summary(bench):
    """Two steps of 2 ms each, worked out by hand; a copy inside the GPU fetches from a peer, as it is on
    a side stream.
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
    names = ("name", "category", "stream", "begin", "end")
    works = [bench.device_time.Work(**dict(zip(names, row, strict=True))) for row in rows]
    found = bench.device_time.summary(works, 2)
    assert found["span"] == 2.0
    assert found["idle"] == pytest.approx((300 + 200 + 300) / 2000)
    assert found["kinds"] == {"communication": 0.75, "optimizer": 0.1, "matmul": 1.0, "copies": 0.1}
    assert found["communication"] == 0.75
    assert found["hidden"] == pytest.approx(600 / 1500)
    assert found["exposed"] == pytest.approx(900 / 2000)
    assert found["longest"][0] == ["gemm", 1.0, 2]
    # without communication there is nothing to hide
    alone = bench.device_time.summary([work for work in works if work.stream == COMPUTE], 1)
    assert alone["hidden"] is None and alone["communication"] == 0.0
    assert alone["kinds"]["matmul"] == 2.0


TRACE = """{"traceEvents": [
{"ph": "X", "cat": "kernel", "name": "gemm", "ts": 10.5, "dur": 2.0, "args": {"stream": 7}},
{"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy PtoP", "ts": 12, "dur": 1, "args": {"stream": 20}},
{"ph": "X", "cat": "gpu_user_annotation", "name": "nccl:all_gather", "ts": 0, "dur": 9, "args": {"stream": 20}},
{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 9, "args": {}},
{"ph": "i", "cat": "kernel", "name": "mark", "ts": 0, "args": {}},
{"ph": "M", "name": "process_name", "args": {"name": "python"}}
]}"""


def test_reading_a_trace(bench, tmp_path):
    """Only what the device did counts: no operators, annotations, launches, or marks without a
    duration.
    """
    path = tmp_path / "trace.json"
    path.write_text(TRACE)
    found = [
        (w.name, w.category, w.stream, w.begin, w.end) for w in bench.device_time.read_trace(path)
    ]
    assert found == [
        ("gemm", "kernel", COMPUTE, 10.5, 12.5),
        ("Memcpy PtoP", "gpu_memcpy", SIDE, 12.0, 13.0),
    ]
