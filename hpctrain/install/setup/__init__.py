"""`make setup`: a venv with torch, an MPI and Horovod, quick when there is nothing to do.

`stamp` and `site_mpi` decide purely what is needed, `venv` and `sequence` do it.
"""
