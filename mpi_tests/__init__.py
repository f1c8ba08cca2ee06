"""The tests: `unit` (pure), `ranks` (the same files at n = 1, 2, 3, 4), `launch` (start jobs)."""
