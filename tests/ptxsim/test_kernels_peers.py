"""Kernels that their authors ran on real chips, executed unmodified and compared with float64.

The seed's four backward kernels, FlashAttention-4 for SM100 and SM90, CUTLASS's tcgen05 tutorials
and Hopper GEMMs.  What runs here always is small; PTXSIM_FULL=1 adds the rest (`make sim`).
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import peers

full = pytest.mark.skipif(not peers.FULL, reason="slow: PTXSIM_FULL=1 runs it (make sim)")
SEED_TOLERANCE = 0.007  # the seed's own, L2-relative
# FlashAttention-4 compares with twice the error of bfloat16 arithmetic in PyTorch; on these inputs
# that is about 0.007 too.
FLASH_TOLERANCE = 0.007


@pytest.mark.parametrize(
    ("lengths", "seed", "limit"),
    [
        pytest.param("9", 0, 60, id="9"),
        pytest.param("3,70", 4, 60, id="3-70-priorities"),
        pytest.param("256", 0, 120, id="256", marks=full),
        pytest.param("256", 1, 300, id="256-seed1", marks=full),
        pytest.param("256", 2, 300, id="256-seed2", marks=full),
        pytest.param("127,129,1,2,3,5,128", 0, 300, id="packed", marks=full),
    ],
)
def test_seed_backward(pytestconfig: pytest.Config, lengths: str, seed: int, limit: int) -> None:
    result = peers.run(
        "seed_backward.py", "--lengths", lengths, "--seed", str(seed),
        path=peers.packages(pytestconfig),
    )  # fmt: skip
    assert result["launches"] == 7
    for name in ("dq", "dk", "dv"):
        assert result[name] <= SEED_TOLERANCE, result
    assert result["seconds"] <= limit


@pytest.mark.parametrize(
    ("arch", "arguments", "launches"),
    [
        pytest.param("sm_100a", "--backward", 4, id="sm100"),
        pytest.param("sm_90a", "--backward", 4, id="sm90"),
        *(
            pytest.param(arch, f"--backward --races --seed {seed}", 4, id=f"{arch[:-1]}-seed{seed}",
                         marks=full)
            for arch in ("sm_100a", "sm_90a")
            for seed in (1, 2, 4)
        ),
        pytest.param("sm_100a", "--backward --queries 300 --keys 451 --heads 4 --key_heads 2", 6,
                     id="sm100-ragged", marks=full),
        pytest.param("sm_90a", "--backward --full --queries 300 --keys 451 --width 64", 4,
                     id="sm90-ragged", marks=full),
    ],
)  # fmt: skip
def test_flash_attention(
    pytestconfig: pytest.Config, arch: str, arguments: str, launches: int
) -> None:
    result = peers.run(
        "flash_attention.py", "--arch", arch, *arguments.split(),
        path=peers.packages(pytestconfig),
    )  # fmt: skip
    assert result["launches"] == launches
    for name in ("out", "dq", "dk", "dv"):
        assert result[name] <= FLASH_TOLERANCE, result
    assert result["lse"] <= 1e-4
    assert result["seconds"] <= 60


@pytest.mark.parametrize(
    ("example", "arguments"),
    [
        ("fp16_gemm_0", "--shape 128,256,256"),
        ("fp16_gemm_1", ""),  # two CTAs, the bar: 512 x 512 x 256 in 20 s
        ("fp16_gemm_2", ""),
        ("fp16_gemm_3", ""),
        ("fp16_gemm_3_1", "--processes 1"),
        ("fp16_gemm_4", ""),
        ("fp16_gemm_5", ""),  # clusters of four
        ("fp16_gemm_1", "--seed 1 --races"),
        ("fp16_gemm_1", "--seed 2 --races"),
        ("fp16_gemm_5", "--seed 4 --races"),
    ],
)
def test_cutlass_tutorial(example: str, arguments: str) -> None:
    folder = peers.cutlass_examples() / "blackwell" / "tutorial" / "tutorial_gemm"
    result = peers.run(
        "cutlass_gemm.py", "--example", str(folder / f"{example}.py"), *arguments.split()
    )
    assert result["difference"] == 0
    assert result["largest"] > 100
    assert result["seconds"] <= 20


@pytest.mark.parametrize(
    ("example", "arguments"),
    [
        ("dense_gemm", "--shape 256,256,128,1"),
        ("dense_gemm", "--shape 256,256,128,1 --tile 64x64 --cluster 2x1 --seed 2 --races"),
        ("dense_gemm", "--shape 200,136,72,2 --cluster 1x2 --majors mnm"),
        ("dense_gemm_persistent", "--shape 512,256,192,1 --tile 128x256 --cluster 2x1"),
        ("dense_gemm_persistent", "--shape 384,256,192,1 --majors mkn --seed 1 --races"),
    ],
)
def test_cutlass_hopper_gemm(example: str, arguments: str) -> None:
    folder = peers.cutlass_examples() / "hopper" / "kernel" / "dense_gemm"
    result = peers.run(
        "cutlass_gemm.py", "--example", str(folder / f"{example}.py"), *arguments.split()
    )
    assert result["difference"] == 0
    assert result["largest"] > 50
    assert result["seconds"] <= 20


@full
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("01_mma_sm100", "--fence"),
        ("01_mma_sm100", "--fence --seed 2 --races"),
        ("04_mma_tma_2sm_sm100", "--races"),
        ("04_mma_tma_2sm_sm100", "--seed 1"),
        ("04_mma_tma_2sm_sm100", "--seed 4 --races"),
    ],
)
def test_cutlass_cxx_tutorial(pytestconfig: pytest.Config, name: str, arguments: str) -> None:
    root = peers.cutlass_sources(pytestconfig)
    result = peers.run("cutlass_cxx.py", "--root", str(root), "--name", name, *arguments.split())
    assert result["error"] == ""
    assert result["difference"] == 0
    assert result["largest"] > 100


@full
def test_cutlass_tutorial_01_lacks_a_proxy_fence(pytestconfig: pytest.Config) -> None:
    """As published: generic stores of a tile, a barrier, and the product at once."""
    root = peers.cutlass_sources(pytestconfig)
    result = peers.run("cutlass_cxx.py", "--root", str(root), "--name", "01_mma_sm100")
    assert result["error"].startswith("MissingFence: tcgen05.mma (B) reads shared bytes")
