"""The fast CPU path: key-major over the inverse schedule, one GEMM per key block and query tile.

Everything is computed in fp32 (fp64 for fp64 inputs), since CPUs multiply bf16 slowly and round it
early. No stage needs memory that grows with T^2 or with topk.
"""
