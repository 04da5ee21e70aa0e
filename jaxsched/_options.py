"""What a user may ask `scheduled` for."""

import dataclasses
from typing import Literal

__all__ = ["CopyPolicy", "Options"]

CopyPolicy = Literal["allow", "warn", "error"]


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """The arguments of `scheduled`."""

    infer: bool = True
    copies: CopyPolicy = "allow"
