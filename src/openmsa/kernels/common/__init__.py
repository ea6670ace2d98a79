"""CuTe DSL plumbing that knows no stage of MSA."""
