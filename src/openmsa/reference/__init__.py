"""The definition of right: every stage in plain torch, in any float dtype, on any device.

Written to be read and to be compared with, not to be fast. ``block_scores``, ``forward`` and the
dense definition are differentiable by autograd; ``backward`` writes the same gradients out by hand.
"""
