"""Sweeps over ranks, engines and settings; layouts of a node; laws of scaling; comparisons.

| module | what |
| --- | --- |
| points | which launches a sweep consists of (pure) |
| folder | a sweep on disk: its plan, and what has been measured so far |
| local | launches on this machine, interleaved, under watch for foreign load |
| jobs | the same as batch jobs, one per number of nodes |
| outcome | a result from what was measured: efficiency, split, failed points (pure) |
| curves | baselines, ratios, and the laws of each curve (pure) |
| repeating | the command that measures a sweep again (pure) |
| laws | Amdahl, Gustafson, Karp-Flatt, with intervals (pure) |
| table | a result in words and tables (pure) |
| layouts | the best ranks x threads, where `hpctrain run -n auto` finds them |
| comparing | two results: slower beyond noise, or other counts (pure) |

A result is one of `hpctrain.bench.schema` with one more key, `scale`; docs/scaling.md
lists what is in it.
"""
