"""How the configuration dataclasses are declared: keyword-only, immutable, strictly typed, no unknown keys."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, TypeVar, cast, dataclass_transform

from pydantic import AfterValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass
from pydantic_core import PydanticCustomError

from optimus_cc.paths import at_home

T = TypeVar("T")


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(Field,))
def strict(cls: type[T]) -> type[T]:
    """Decorator for every configuration dataclass."""
    return cast(type[T], dataclass(kw_only=True, frozen=True, config=ConfigDict(extra="forbid", strict=True))(cls))


def changed(node: T, **values: Any) -> T:
    """A configuration with other values for some of its fields, checked as when it was made."""
    this: Any = node  # type checkers don't see that it is a dataclass
    return cast(T, replace(this, **values))


def _at_home(path: str) -> str:
    try:
        return at_home(path)
    except ValueError as error:
        raise PydanticCustomError("path", "{allowed}", {"allowed": str(error)}) from None


PathText = Annotated[str, AfterValidator(_at_home)]
"""A path of a file or a folder; ``~`` stands for the home of whoever runs it."""
LARGEST_INT = 2**31 - 1
"""Counts and sizes end here, so that a product of two of them fits into the 64 bits of a tensor's size."""
LARGEST_FLOAT = 1e16
"""Numbers end here: divided by the least 1 - beta, or multiplied by one another, they still fit into a float32."""
YEAR_S = 366 * 24 * 3600
"""Durations end here; operating systems can't wait for much longer ones."""
PositiveInt = Annotated[int, Field(ge=1, le=LARGEST_INT)]
NonNegativeInt = Annotated[int, Field(ge=0, le=LARGEST_INT)]
PositiveFloat = Annotated[float, Field(gt=0, le=LARGEST_FLOAT, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, le=LARGEST_FLOAT, allow_inf_nan=False)]
Seconds = Annotated[float, Field(gt=0, le=YEAR_S, allow_inf_nan=False)]
Hours = Annotated[float, Field(gt=0, le=YEAR_S / 3600, allow_inf_nan=False)]
Threads = Annotated[int, Field(ge=1, le=1024)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
"""A share in [0, 1)."""
NAME, MAX_NAME = r"^[A-Za-z0-9][A-Za-z0-9_.]*$", 40
Name = Annotated[str, Field(pattern=NAME, max_length=MAX_NAME)]
"""A name that may stand in a folder's name."""
