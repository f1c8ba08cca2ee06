"""Real clusters on one machine, for tests: nodes made of namespaces, and a Slurm on top of them."""
