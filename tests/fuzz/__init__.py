"""Random programs against oracles that are not the compiler; `python -m tests.fuzz --help`."""
