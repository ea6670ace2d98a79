"""Properties that hold for every input, on every CPU backend, against float64 definitions."""
