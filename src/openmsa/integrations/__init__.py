"""Thin adapters to training frameworks; each imports its framework on first use only."""
