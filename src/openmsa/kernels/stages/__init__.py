"""Stages that more than one architecture's kernels use as they are."""
