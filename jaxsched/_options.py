"""What a user may ask `scheduled` for."""

import dataclasses

__all__ = ["Options"]


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """The arguments of `scheduled`."""

    infer: bool = True
