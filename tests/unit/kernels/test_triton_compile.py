"""The Triton kernels compile for real GPUs without one: cubin, shared memory, instructions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton", reason="triton is an extra")

if triton.knobs.runtime.interpret:
    pytest.skip("TRITON_INTERPRET replaces the compiler", allow_module_level=True)

import torch  # noqa: E402
import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from kernels.triton_impl.paged_decode import merge_splits_kernel, paged_decode_kernel  # noqa: E402
from kernels.triton_impl.paged_prefill import paged_prefill_kernel  # noqa: E402
from kernels.triton_impl.tuning import (  # noqa: E402
    FP_FUSION,
    SPLIT_KEYS,
    Tiling,
    compute_dtype,
    decode_tiling,
    prefill_tiling,
)

# Shared memory a block may use on sm_80 and sm_90, in bytes.
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
POINTERS = {"q": "", "kv_pool": "", "out": ""}
INT_POINTERS = ("block_tables", "query_starts", "context_lens")


@pytest.fixture(autouse=True)
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def compile_for(
    kernel: Any, capability: int, dtype: str, tiling: Tiling, constexprs: dict[str, Any]
) -> Any:
    """Compile `kernel` with its launcher's sizes for a GPU of this compute capability."""
    signature = {}
    for name in kernel.arg_names:
        if name in constexprs:
            signature[name] = "constexpr"
        elif name in POINTERS:
            signature[name] = f"*{dtype}"
        elif name in INT_POINTERS:
            signature[name] = "*i32"
        elif name == "pool_offsets":
            signature[name] = "*i64"
        elif name.startswith("partial_"):
            signature[name] = "*fp32"
        else:
            signature[name] = "fp32" if name == "scale_log2" else "i32"
    return triton.compile(
        ASTSource(fn=kernel, signature=signature, constexprs=constexprs),
        target=GPUTarget("cuda", capability, 32),
        options={
            "num_warps": tiling.num_warps,
            "num_stages": tiling.num_stages,
            "enable_fp_fusion": FP_FUSION,
        },
    )


def constexprs_of(tiling: Tiling, head_dim: int, group: int, dtype: str) -> dict[str, Any]:
    return {
        "BLOCK_SIZE": 16,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "BLOCK_D": tiling.block_d,
        "BLOCK_M": tiling.block_m,
        "BLOCK_N": tiling.block_n,
        "COMPUTE": compute_dtype(DTYPES[dtype], DTYPES[dtype]),
        "MANY_POOLS": False,
    }


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(
    ("head_dim", "group", "dtype"), [(64, 3, "bf16"), (128, 4, "bf16"), (64, 1, "fp16")]
)
def test_prefill_uses_matrix_instructions(
    capability: int, head_dim: int, group: int, dtype: str
) -> None:
    tiling = prefill_tiling(group, head_dim, 2)
    constexprs = constexprs_of(tiling, head_dim, group, dtype)

    compiled = compile_for(paged_prefill_kernel, capability, dtype, tiling, constexprs)

    assert compiled.asm["cubin"]
    assert 0 < compiled.metadata.shared <= SHARED_LIMIT[capability]
    # 64 rows are one warp group's worth: sm_90 gets wgmma, sm_80 mma.sync.
    assert ("wgmma" if capability == 90 else "mma.sync") in compiled.asm["ptx"]


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(("head_dim", "group"), [(64, 3), (128, 8)])
def test_decode_uses_matrix_instructions(capability: int, head_dim: int, group: int) -> None:
    tiling = decode_tiling(group, head_dim, 2)
    constexprs = constexprs_of(tiling, head_dim, group, "bf16") | {"SPLIT": SPLIT_KEYS}

    compiled = compile_for(paged_decode_kernel, capability, "bf16", tiling, constexprs)

    assert compiled.asm["cubin"]
    assert 0 < compiled.metadata.shared <= SHARED_LIMIT[capability]
    assert "mma.sync" in compiled.asm["ptx"]  # 16 rows: below a warp group


@pytest.mark.parametrize(
    ("capability", "head_dim", "dtype"),
    [(80, 64, "fp32"), (80, 256, "bf16"), (90, 256, "bf16"), (90, 80, "fp16")],
)
def test_float32_large_and_padded_heads_fit(capability: int, head_dim: int, dtype: str) -> None:
    itemsize = DTYPES[dtype].itemsize
    for kernel, tiling, extra in (
        (paged_prefill_kernel, prefill_tiling(2, head_dim, itemsize), {}),
        (paged_decode_kernel, decode_tiling(2, head_dim, itemsize), {"SPLIT": SPLIT_KEYS}),
    ):
        constexprs = constexprs_of(tiling, head_dim, 2, dtype) | extra
        compiled = compile_for(kernel, capability, dtype, tiling, constexprs)
        assert compiled.asm["cubin"]
        assert compiled.metadata.shared <= SHARED_LIMIT[capability]


@pytest.mark.parametrize("capability", [80, 90])
def test_block_tables_over_several_pools_compile(capability: int) -> None:
    for kernel, tiling, extra in (
        (paged_prefill_kernel, prefill_tiling(3, 64, 2), {}),
        (paged_decode_kernel, decode_tiling(3, 64, 2), {"SPLIT": SPLIT_KEYS}),
    ):
        constexprs = constexprs_of(tiling, 64, 3, "bf16") | extra | {"MANY_POOLS": True}
        compiled = compile_for(kernel, capability, "bf16", tiling, constexprs)
        assert compiled.asm["cubin"]
        assert 0 < compiled.metadata.shared <= SHARED_LIMIT[capability]


@pytest.mark.parametrize("capability", [80, 90])
def test_merge_compiles(capability: int) -> None:
    constexprs = {"HEAD_DIM": 64, "BLOCK_D": 64, "SPLIT": SPLIT_KEYS}
    tiling = Tiling(1, 1, 64, num_warps=1, num_stages=1)
    compiled = compile_for(merge_splits_kernel, capability, "bf16", tiling, constexprs)
    assert compiled.asm["cubin"]


def test_compute_type_follows_storage() -> None:
    assert compute_dtype(torch.bfloat16, torch.bfloat16) == tl.bfloat16
    assert compute_dtype(torch.float16, torch.float16) == tl.float16
    assert compute_dtype(torch.float32, torch.bfloat16) == tl.float32
    assert compute_dtype(torch.float32, torch.float32) == tl.float32
