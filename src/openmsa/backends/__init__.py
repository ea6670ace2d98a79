"""Backends: each is a set of stages that the dispatch table names; none imports another."""
