"""Floor 5: the training job: its configuration, its loop, its run directory, what it shows.

Nothing is imported here: configurations are read, and runs are watched, where there is no torch.
"""

from __future__ import annotations
