"""Instruction semantics by family; importing the package registers every builder.

| file | instructions |
|---|---|
| `integer.py` | integer arithmetic, extended precision |
| `floating.py`, `mixed.py` | float arithmetic of all types, approximations; mixed precision |
| `logic.py` | logic, shifts, comparisons, selection |
| `bits.py` | bit fields, counts, permutations, dot products |
| `convert.py`, `addresses.py` | cvt; cvta, mapa, isspacep |
| `control.py` | mov, bra, ret, no-ops |
| `loadstore.py`, `atomic.py` | ld, st, prefetch; atom, red |
| `warp.py` | elect, shfl, vote, match, redux |
| `sync.py` | bar, barrier, mbarrier, fence |
| `async_copy.py`, `tensor_copy.py` | cp.async, bulk copies; tensor copies |
| `tensormap.py` | tensor maps changed on the device |
| `cluster_launch.py` | clusterlaunchcontrol |
| `matrix.py` | matrix descriptors, shared by the two below |
| `tensor_transfer.py` | tcgen05 allocation, ld, st, wait |
| `tcgen05.py`, `wgmma.py`, `mma.py` | matrix instructions of sm_100, sm_90, and of warps |
"""

from ptxsim.isa import (
    addresses,
    async_copy,
    atomic,
    bits,
    cluster_launch,
    control,
    convert,
    floating,
    integer,
    loadstore,
    logic,
    mma,
    sync,
    tcgen05,
    tensor_copy,
    tensor_transfer,
    tensormap,
    warp,
    wgmma,
)

__all__ = [
    "addresses",
    "async_copy",
    "atomic",
    "bits",
    "cluster_launch",
    "control",
    "convert",
    "floating",
    "integer",
    "loadstore",
    "logic",
    "mma",
    "sync",
    "tcgen05",
    "tensor_copy",
    "tensor_transfer",
    "tensormap",
    "warp",
    "wgmma",
]
