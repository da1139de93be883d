"""Frozen dataclasses that are pytrees: of arrays, and of static fields, which are part of a tree's structure."""

import dataclasses
from typing import Any, TypeVar, dataclass_transform

import jax

T = TypeVar("T")
STATIC = "static"


def static(**options: Any) -> Any:
    """Declares a static field, whose value is hashable: programs are compiled for it."""
    return dataclasses.field(metadata={STATIC: True}, **options)


@dataclass_transform(frozen_default=True, field_specifiers=(static, dataclasses.field))
def dataclass(cls: type[T]) -> type[T]:
    """Makes a class a frozen dataclass and a pytree, with a method `replace` as that of `dataclasses`."""
    cls = dataclasses.dataclass(frozen=True)(cls)
    cls.replace = dataclasses.replace
    names = {field.name: STATIC in field.metadata for field in dataclasses.fields(cls)}
    arrays, others = ([name for name, is_static in names.items() if is_static == kind] for kind in (False, True))
    return jax.tree_util.register_dataclass(cls, arrays, others)
