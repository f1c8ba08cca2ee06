"""`python -m hpctrain` is the command `hpctrain` of this interpreter."""

from __future__ import annotations

import sys

from hpctrain.cli import main

if __name__ == "__main__":
    sys.exit(main())
