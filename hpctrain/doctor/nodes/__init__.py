"""Compares the nodes of a running job: one bad node slows a thousand.

`visit` is the collective and measures each rank, `links` measures between nodes; `report`,
`outliers` and `display` are pure.
"""
