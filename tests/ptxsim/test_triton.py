"""Triton kernels, compiled for sm_80, sm_90 and sm_100 without a GPU, against float64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import ptxsim

triton = pytest.importorskip("triton", reason="needs Triton (Linux only)")

import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

from ptxsim.launchers.triton import launch, simulate  # noqa: E402

ARCHES = (80, 90, 100)
# Before 3.7 the compiler put no proxy fence between cp.async and the matrix instruction that reads
# what it copied (its own fix: triton-lang/triton#9610).
FENCES_COPIES = tuple(int(x) for x in triton.__version__.split(".")[:2]) >= (3, 7)
NAN = float("nan")


@pytest.fixture(autouse=True, scope="module")
def _environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Compiled kernels of this run only, and the compiler's fusion said out loud."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        patch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
        yield


@triton.jit
def add_kernel(x, y, out, n, scale, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    total = tl.load(x + i, mask=inside) + scale * tl.load(y + i, mask=inside)
    tl.store(out + i, total, mask=inside)


@triton.jit
def unmasked_kernel(x, out, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i) + 1.0)


@triton.jit
def softmax_kernel(x, out, n, stride, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    row = tl.program_id(0) * stride + i
    values = tl.load(x + row, mask=i < n, other=-float("inf")).to(tl.float32)
    values = tl.exp(values - tl.max(values, 0))
    tl.store(out + row, values / tl.sum(values, 0), mask=i < n)


@triton.jit
def matmul_kernel(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    m = tl.program_id(0) * BM + tl.arange(0, BM)[:, None]
    n = tl.program_id(1) * BN + tl.arange(0, BN)[None, :]
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        left = tl.load(a + m * K + k[None, :], mask=(m < M) & (k[None, :] < K), other=0.0)
        right = tl.load(b + k[:, None] * N + n, mask=(k[:, None] < K) & (n < N), other=0.0)
        acc = tl.dot(left, right, acc)
    tl.store(c + m * N + n, acc, mask=(m < M) & (n < N))


@triton.jit
def described_matmul_kernel(a, b, c, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    m, n = tl.program_id(0) * BM, tl.program_id(1) * BN
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        acc = tl.dot(a.load([m, k]), b.load([k, n]), acc)
    c.store([m, n], acc)


@triton.jit
def histogram_kernel(x, counts, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    tl.atomic_add(counts + tl.load(x + i, mask=inside, other=0), 1, mask=inside)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


@pytest.mark.parametrize("arch", ARCHES)
def test_vector_add_touches_its_part_only(arch: int) -> None:
    x, y = torch.randn(1000), torch.randn(1000)
    out = torch.full((1024,), NAN)
    with simulate(arch) as session:
        add_kernel[(4,)](x, y, out, 1000, 0.5, BLOCK=256)
    torch.testing.assert_close(out[:1000], x + 0.5 * y, rtol=0, atol=2**-23 * 8)
    assert out[1000:].isnan().all()
    (done,) = session.launches
    assert (done.kernel, done.grid, done.block) == ("add_kernel", (4, 1, 1), 128)
    assert f".target sm_{arch}" in done.ptx
    assert done.result.steps > 0


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_softmax(dtype: torch.dtype, arch: int) -> None:
    x = (4 * torch.randn(3, 300)).to(dtype)
    out = torch.empty_like(x)
    with simulate(arch):
        softmax_kernel[(3,)](x, out, 300, 300, BLOCK=512)
    # An argument v of exp2 is off by some |v| 2^-23 from its subtraction and product, ex2 by 2^-22.
    v = x.double() - x.double().amax(-1, keepdim=True)
    want = x.double().softmax(-1)
    bound = (v.abs() + 4) * 2**-22 + torch.finfo(dtype).eps
    assert ((out.double() - want).abs() <= bound * want).all()


@pytest.mark.parametrize(
    ("arch", "dtype"),
    [(arch, dtype) for arch in ARCHES for dtype in (torch.float16, torch.float32)]
    + [(90, torch.bfloat16)],
)
def test_matmul_by_the_matrix_unit_of_each_architecture(arch: int, dtype: torch.dtype) -> None:
    """mma.sync, wgmma and tcgen05.mma as the compiler emits them, on ragged shapes."""
    M, N, K = 60, 80, 80
    a, b = torch.randn(M, K).to(dtype), torch.randn(K, N).to(dtype)
    c = torch.full((M, N), NAN)

    def run() -> str:
        with simulate(arch) as session:
            matmul_kernel[(1, 2)](a, b, c, M, N, K, BM=64, BN=64, BK=32, num_warps=4)
        return session.launches[0].ptx

    if arch > 80 and not FENCES_COPIES:
        with pytest.raises(ptxsim.MissingFence, match=r"fence\.proxy\.async"):
            run()
        return
    ptx = run()
    assert {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}[arch] in ptx
    want = a.double() @ b.double()
    # f32 operands are rounded to tf32, with 11 bits of precision.
    assert relative_error(c, want) <= (2**-10 if dtype == torch.float32 else 2**-21)


@triton.jit
def chained_matmul_kernel(a, b, c, out, M: tl.constexpr, N: tl.constexpr):
    m, n = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :]
    inner = tl.arange(0, N)[:, None]
    part = tl.dot(tl.load(a + m * N + n), tl.load(b + inner * N + n))
    tl.store(out + m * N + n, tl.dot(part.to(tl.bfloat16), tl.load(c + inner * N + n)))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("arch", ARCHES)
def test_warps_without_a_part_of_their_own_store_replicas(arch: int, seed: int) -> None:
    """A tile of 16 rows and 32 columns is four parts; with eight warps, each is computed twice and
    stored twice on its way to the next product."""
    a, b, c = (torch.randn(rows, 32, dtype=torch.bfloat16) for rows in (16, 32, 32))
    out = torch.full((16, 32), NAN)
    with simulate(arch, seed=seed, races=True) as session:
        chained_matmul_kernel[(1,)](a, b, c, out, M=16, N=32, num_warps=8)
    assert "mma.sync" in session.launches[0].ptx
    # Sums that differ in their last bit may round to the other bfloat16 neighbour.
    part = (a.double() @ b.double()).to(torch.bfloat16).double()
    assert relative_error(out, part @ c.double()) <= 2**-9


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("arch", [90, 100])
def test_matmul_through_host_tensor_descriptors(arch: int, seed: int) -> None:
    M, N, K = 120, 64, 96
    a, b = torch.randn(M, K, dtype=torch.bfloat16), torch.randn(K, N, dtype=torch.bfloat16)
    c = torch.full((M, N), NAN)
    blocks = {"BM": 128, "BN": 64, "BK": 64}
    with simulate(arch, seed=seed) as session:
        described_matmul_kernel[(1, 1)](
            TensorDescriptor.from_tensor(a, [128, 64]),
            TensorDescriptor.from_tensor(b, [64, 64]),
            TensorDescriptor.from_tensor(c, [128, 64]),
            K,
            **blocks,
        )
    assert "cp.async.bulk.tensor" in session.launches[0].ptx
    assert relative_error(c, a.double() @ b.double()) <= 2**-21


@triton.jit
def device_described_kernel(x, out, M, N, BM: tl.constexpr, BN: tl.constexpr):
    source = tl.make_tensor_descriptor(x, [M, N], [N, 1], [BM, BN])
    target = tl.make_tensor_descriptor(out, [M, N], [N, 1], [BM, BN])
    m, n = tl.program_id(0) * BM, tl.program_id(1) * BN
    target.store([m, n], source.load([m, n]) * 2)


@pytest.mark.parametrize("arch", ARCHES)
def test_tensor_descriptors_made_on_the_device(arch: int) -> None:
    """Before sm_90 the compiler makes plain loads of them; then maps in the kernel's scratch."""
    x = torch.randn(40, 72)
    out = torch.full((40, 72), NAN)
    before = triton.runtime._allocation._allocator.get()
    triton.set_allocator(lambda size, align, stream: torch.zeros(size, dtype=torch.int8))
    try:
        with simulate(arch) as session:
            device_described_kernel[(2, 3)](x, out, 40, 72, BM=32, BN=32)
    finally:
        triton.set_allocator(before)
    assert torch.equal(out, 2 * x)
    assert ("tensormap.replace" in session.launches[0].ptx) == (arch >= 90)


@pytest.mark.parametrize("arch", ARCHES)
def test_atomics(arch: int) -> None:
    x = torch.randint(0, 7, (500,), dtype=torch.int32)
    counts = torch.zeros(7, dtype=torch.int32)
    with simulate(arch):
        histogram_kernel[(4,)](x, counts, 500, BLOCK=128)
    torch.testing.assert_close(counts.long(), torch.bincount(x, minlength=7))


def compiled_add(arch: int):
    signature = {
        "x": "*fp32",
        "y": "*fp32",
        "out": "*fp32",
        "n": "i32",
        "scale": "fp32",
        "BLOCK": "constexpr",
    }
    source = ASTSource(add_kernel, signature, {"BLOCK": 128})
    return triton.compile(source, target=GPUTarget("cuda", arch, 32))


@pytest.mark.parametrize("arch", ARCHES)
def test_a_kernel_compiled_by_hand(arch: int) -> None:
    x, y = torch.randn(200), torch.randn(200)
    out = torch.empty(200)
    launch(compiled_add(arch), (2,), [x, y, out, 200, 2.0])
    torch.testing.assert_close(out, x + 2 * y, rtol=0, atol=2**-23 * 8)


def test_the_number_of_arguments_is_checked() -> None:
    with pytest.raises(ptxsim.LaunchError, match="5 arguments, 2 given"):
        launch(compiled_add(80), (1,), [torch.zeros(1), 1])


def test_a_missing_mask_is_found_and_located_in_the_python_source() -> None:
    x, out = torch.randn(100), torch.empty(128)
    with simulate(80), pytest.raises(ptxsim.OutOfBounds) as caught:
        unmasked_kernel[(1,)](x, out, BLOCK=128)
    assert caught.value.line is not None
    assert "test_triton.py" in str(caught.value.source)
    assert caught.value.address is not None


def test_the_active_driver_comes_back() -> None:
    before = triton.runtime.driver._active
    with simulate(90):
        assert triton.runtime.driver.active.get_current_target().arch == 90
    assert triton.runtime.driver._active is before
