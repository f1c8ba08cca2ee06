"""`python3 -m hpctrain.install.bootstrap`: from a fresh machine to a working environment.

Only the standard library is there when this runs, and perhaps an old Python: this file parses in
those too, so that they get a sentence and no syntax error. The work is in `hpctrain.install.setup`.
"""

import sys

__all__ = ["main"]


def main() -> int:
    """Refuse what cannot work, then set up."""
    if sys.version_info < (3, 11):  # noqa: UP036 - the user's Python, before anything is installed
        found = ".".join(str(part) for part in sys.version_info[:3])
        print(
            "hpctrain: Python 3.11 or later is required, and "
            + sys.executable
            + " is "
            + found
            + "; name a newer one: make PYTHON=python3.11 setup",
            file=sys.stderr,
        )
        return 2
    if not sys.platform.startswith("linux"):
        print("hpctrain: only Linux is supported, and this is " + sys.platform, file=sys.stderr)
        return 2
    from hpctrain.install.setup.sequence import main as set_up

    return set_up(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
