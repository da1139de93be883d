"""Values of a config file: read by key, each of its type and within its bounds, or refused in one line."""

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from treeflash_jax.core.checks import INT32, fit, quoted


@dataclass(frozen=True)
class Keys:
    """The object of a config file, or one inside it; `where` is the file and the path of keys inside it, for messages."""

    raw: Mapping[str, Any]
    where: str

    def __contains__(self, key: str) -> bool:
        """Returns true if the key is there and not null."""
        return self.raw.get(key) is not None

    def whole(self, key: str, default: Any = None, least: int = 1, most: int = INT32) -> int:
        says = f"a whole number of at least {least}" + ("" if most == INT32 else f" and at most {most}")
        return self.value(int, key, default, says, least=least, most=most)

    def number(self, key: str, default: Any = None, least: float | None = None) -> float:
        """Returns a number above 0, or of at least `least`."""
        if least is None:
            return self.value(float, key, default, "a number above 0", above=0)
        return self.value(float, key, default, f"a number of at least {least}", least=least)

    def truth(self, key: str, default: Any = None) -> bool:
        return self.value(bool, key, default, "true or false")

    def table(self, key: str, required: bool = False) -> Self:
        """Returns an object inside this one; an optional one that is absent is empty."""
        raw = self.value(dict[str, Any], key, None, "an object") if key in self or required else {}
        return Keys(raw, f"{self.where}: {key}")

    def ids(self, key: str, most: int, required: bool = True) -> tuple[int, ...]:
        """Returns the ids of a key that holds one or a list of them, or none if they are not required."""
        value = self.raw.get(key)
        if not required and value in (None, []):
            return ()
        value, says = value if isinstance(value, list | tuple) else [value], f"ids (whole numbers from 0 to {most})"
        return fit(Sequence[int], value, f"{key} =", self.where, says=says, least=0, most=most, min_length=1)

    def value(self, kind: Any, key: str, default: Any, says: str, **limits: Any) -> Any:
        """Returns the value of a key as a type or type hint; `default` replaces a missing key, not null."""
        return fit(kind, self.raw.get(key, default), f"{key} =", self.where, says=says, **limits)

    def check_known(self, known: Collection[str], refused: Collection[str] | None = None) -> None:
        """Raises ValueError for a key that is not in `known`; with `refused`, only for one of these; warns of others."""
        unknown = sorted(set(self.raw) - set(known))
        wrong = unknown if refused is None else [key for key in unknown if key in refused]
        if wrong:
            raise ValueError(f"{self.where}: unknown key {quoted(wrong[0])} might change numbers and is not implemented")
        if unknown:
            warnings.warn(f"{self.where}: unknown keys {quoted(unknown, 160)} are ignored", stacklevel=2)

    def check_only(self, accepted: Mapping[str, tuple[Any, ...]]) -> None:
        """Raises ValueError for a value that is not implemented; an absent key has the first one. 1 does not equal true."""
        for key, values in accepted.items():
            value = self.raw.get(key, values[0])
            if not any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in values):
                raise ValueError(f"{self.where}: {key} = {quoted(value)} is not implemented, expected {values[0]!r}")
