"""Benchmarks: our server beside others on the same weights, and what HTTP costs."""
