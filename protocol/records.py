"""Field by field checks between a map from the wire and a dataclass, fast when everything is right, exact when it is not.

The usual case costs two C calls per record: pick the values, compare the tuple of their types. Only a record that fails
that comparison is looked at field by field, and every error begins with the path of the field.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from operator import attrgetter, itemgetter
from typing import Any, NoReturn, TypeVar

import numpy as np

from protocol.errors import CodecError
from protocol.packing import nearest

T = TypeVar("T")

Check = Callable[[Any, str], Any]


class FieldError(CodecError):
    """A CodecError whose text begins with the path of a field, as in `turns[1].end: …`."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = path
        self.problem = problem


def below(name: str, error: CodecError) -> FieldError:
    """The same error, its path beginning with `name`."""
    if isinstance(error, FieldError):
        return FieldError(f"{name}{'' if error.path.startswith('[') else '.'}{error.path}", error.problem)
    return FieldError(name, str(error))


def under(name: str, function: Callable[..., T], *args: Any) -> T:
    """Run `function(*args)`; the path of its CodecError begins with `name`."""
    try:
        return function(*args)
    except CodecError as error:
        raise below(name, error) from None


def each(name: str, function: Callable[[Any], T], items: Sequence[Any]) -> list[T]:
    """`function` of every item; the path of a CodecError begins with `name[index]`."""
    try:
        return [function(item) for item in items]
    except CodecError:
        for index, item in enumerate(items):  # the usual case pays nothing for knowing the index
            under(f"{name}[{index}]", function, item)
        raise


class Record:
    """The fields of one kind of map, in order, each with its check (`anything`: the caller looks at it)."""

    def __init__(self, **checks: Check) -> None:
        self.names = tuple(checks)
        self._checks = checks
        exact = {name: _EXACT[check] for name, check in checks.items() if check in _EXACT}
        self._types = tuple(exact.values())
        self._items: Callable[[Any], tuple[Any, ...]] = itemgetter(*self.names)
        self._attributes: Callable[[Any], tuple[Any, ...]] = attrgetter(*self.names)
        self._typed_items: Callable[[Any], tuple[Any, ...]] = itemgetter(*exact)
        self._typed_attributes: Callable[[Any], tuple[Any, ...]] = attrgetter(*exact)
        self._all_typed = len(exact) == len(checks)

    def read(self, body: Any) -> tuple[Any, ...]:
        """The values of `body`, checked, in order. Raises: CodecError on unknown, missing or wrong fields."""
        if body.__class__ is not dict:
            raise CodecError(f"expected a map, got {shown(body)}")
        try:
            values = self._items(body)
        except KeyError:
            refuse_names(body, self.names)
        if len(body) != len(values):
            refuse_names(body, self.names)
        typed = values if self._all_typed else self._typed_items(body)
        return values if tuple(map(type, typed)) == self._types else self._checked(values)

    def pack(self, message: object) -> dict[str, Any]:
        """The map of the object's attributes, checked."""
        values = self._attributes(message)
        typed = values if self._all_typed else self._typed_attributes(message)
        if tuple(map(type, typed)) != self._types:
            values = self._checked(values)
        return dict(zip(self.names, values, strict=True))

    def _checked(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple([check(value, name) for (name, check), value in zip(self._checks.items(), values, strict=True)])


def refuse_names(body: Mapping[str, Any], known: Collection[str]) -> NoReturn:
    """Say which name is unknown (with the nearest known one) or missing."""
    for name in body:
        if name not in known:
            raise CodecError(f"unknown field {name!r}{nearest(name, known)}")
    raise CodecError(f"missing field {min(set(known) - set(body))!r}")


def integer(value: Any, name: str) -> int:
    if value.__class__ is int:
        return value
    if isinstance(value, np.integer):
        return int(value)
    raise FieldError(name, f"expected an int, got {shown(value)}")


def number(value: Any, name: str) -> float:
    """A float; an int is taken too. NaN and infinities pass."""
    if value.__class__ in (float, int) or isinstance(value, np.floating | np.integer):
        return float(value)
    raise FieldError(name, f"expected a float, got {shown(value)}")


def optional_number(value: Any, name: str) -> float | None:
    return None if value is None else number(value, name)


def text(value: Any, name: str) -> str:
    if isinstance(value, str):
        return str(value)
    raise FieldError(name, f"expected a string, got {shown(value)}")


def optional_text(value: Any, name: str) -> str | None:
    return None if value is None else text(value, name)


def sequence(value: Any, name: str) -> list[Any]:
    if isinstance(value, list):
        return value
    raise FieldError(name, f"expected a list, got {shown(value)}")


def mapping(value: Any, name: str) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    raise FieldError(name, f"expected a map, got {shown(value)}")


def anything(value: Any, name: str) -> Any:
    """For fields that their reader checks."""
    return value


def shown(value: Any) -> str:
    """A short repr with the type, for messages."""
    written = repr(value)
    return f"{written[:60]}{'…' if len(written) > 60 else ''} ({type(value).__name__})"


_EXACT: Mapping[Check, type] = {
    integer: int,
    number: float,
    optional_number: float,
    text: str,
    optional_text: type(None),
    sequence: list,
    mapping: dict,
}
"""The type of a value that a check certainly passes unchanged."""
