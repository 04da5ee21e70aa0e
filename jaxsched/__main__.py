"""The command line: `python -m jaxsched demo` and `python -m jaxsched hlo FILE...`."""

import sys

from jaxsched import _demo
from jaxsched._hlo import _cli

_COMMANDS = {"demo": _demo.main, "hlo": _cli.main}

_USAGE = """usage: python -m jaxsched COMMAND ...

  demo [--size N]   an in-place update under plain jit and scheduled: copies, HLO, times
  hlo FILE...       the copies and control edges in optimized HLO text

`python -m jaxsched COMMAND --help` says more."""


def main(argv: list[str]) -> int:
    """Runs one command; 2 where there is none of that name."""
    if argv and argv[0] in _COMMANDS:
        return _COMMANDS[argv[0]](argv[1:])
    asked = bool(argv) and argv[0] in ("-h", "--help")
    print(_USAGE, file=sys.stdout if asked else sys.stderr)
    return 0 if asked else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
