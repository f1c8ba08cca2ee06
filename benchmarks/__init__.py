"""Benchmarks of hpctrain and its peers; docs/benchmarks.md says how they measure."""
