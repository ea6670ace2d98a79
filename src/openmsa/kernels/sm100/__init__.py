"""Kernels for Blackwell data-centre GPUs (compute capability 10.x), in the CuTe DSL."""
