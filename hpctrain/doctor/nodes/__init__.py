"""Compares the nodes of a running job: one bad node slows a thousand.

`visit` is the collective; `schedule` and `outliers` are pure; `measuring` and `links` measure.
"""
