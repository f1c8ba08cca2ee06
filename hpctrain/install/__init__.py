"""Setting up: which MPI is here, building Horovod for exactly this torch and MPI, the venv.

Standard library only, so that all of it works before anything is installed.
"""
