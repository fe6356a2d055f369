"""Names that resolve to implementations, ours and those of plug-ins alike."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import entry_points
from typing import Generic, TypeVar

from lehr.core.errors import ConfigError, UnknownName

T = TypeVar("T")


class Registry(Generic[T]):
    """Maps names to objects. Plug-ins register through the entry-point group ``lehr.<kind>``; they are
    looked up only when a name is not found among those registered in code.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._items: dict[str, T] = {}

    def register(self, name: str, item: T) -> T:
        """Register ``item`` under ``name``; the same name twice is an error."""
        if name in self._items and self._items[name] is not item:
            raise ConfigError(f"{self.kind} {name!r} is registered twice")
        self._items[name] = item
        return item

    def get(self, name: str) -> T:
        """Return what ``name`` stands for, or raise :class:`UnknownName` with near matches."""
        if name not in self._items:
            for point in entry_points(group=f"lehr.{self.kind}"):
                if point.name == name:
                    self._items[name] = point.load()
                    break
            else:
                raise UnknownName.among(self.kind, name, self)
        return self._items[name]

    def __iter__(self) -> Iterator[str]:
        yield from self._items
        yield from (p.name for p in entry_points(group=f"lehr.{self.kind}") if p.name not in self._items)
