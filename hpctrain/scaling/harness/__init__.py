"""One way of measuring for all benchmarks.

| module | what |
| --- | --- |
| ratios | medians of paired ratios and their intervals (pure) |
| load | CPU time that others take (parsing is pure) |
| blocks | shuffled orders, and which blocks count (pure) |
| control | the launches, of which one at a time is awake |
| worker | a rank's side: waits on a socket, measures when told |
| session | runs a plan and makes a result |
| schema | what a result contains, and its file name (pure) |
| machine | where it was measured |
| render | results as tables (pure) |
| command | options that all benchmarks share |
"""
