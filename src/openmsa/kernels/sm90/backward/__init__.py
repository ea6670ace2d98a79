"""The backward for Hopper: dq, dk and dv of a selection, key-major."""
