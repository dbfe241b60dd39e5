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
PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
"""A share in [0, 1)."""
NAME, MAX_NAME = r"^[A-Za-z0-9][A-Za-z0-9_.]*$", 40
Name = Annotated[str, Field(pattern=NAME, max_length=MAX_NAME)]
"""A name that may stand in a folder's name."""
