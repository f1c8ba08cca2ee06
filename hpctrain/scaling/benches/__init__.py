"""What `hpctrain bench` measures besides a user's script, and `benchmarks/` is made of.

A benchmark is a module with `add_arguments(parser)` and `main(args) -> int`, which is also what its
ranks run, started with `--worker`; a module of subjects beside it is imported on the ranks alone.
"""
