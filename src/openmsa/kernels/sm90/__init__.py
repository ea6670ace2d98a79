"""Kernels for Hopper (compute capability 9.0), in the CuTe DSL."""
