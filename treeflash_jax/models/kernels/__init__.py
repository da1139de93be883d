"""Registry of kernels: the operation that each replaces, the device it was written for, and whether it ever ran there.

A model names an operation, asks `find` for its kernel, and runs the plain variant if there is none. A name of attention
selects that attention. Kernels of other operations belong to sets, and a call may choose a set (`use`). If a kernel does
not take the operands, the plain variant runs, and one line says so. Variants that XLA compiles, and that devices use by
default, are in `models.backend`.

To add a kernel, write a file in this folder and add a line to KERNELS. The file is imported at first use, because importing
Pallas is slow. It has `run`, which replaces the plain variant; `supports`, which returns whether the kernel takes the
operands; and TAKES, which says the same in words. A CPU interprets kernels, slowly.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from treeflash_jax.core.devices import Device
from treeflash_jax.core.error_text import warn

HOPPER = ("NVIDIA H100", "NVIDIA H200")


@dataclass(frozen=True)
class Kernel:
    """An entry of the registry.

    Attributes:
      module: name of the kernel's file.
      backend: JAX's name of the backend.
      chips: first words of JAX's names for the chips.
      has_run: whether it ever ran on such a chip. If not, CPUs interpreted it, and it was at most compiled for such a chip.
      oldest_jax: first version of JAX that has what the kernel needs.
    """

    module: str
    backend: str
    chips: tuple[str, ...] = ("",)
    has_run: bool = False
    oldest_jax: tuple[int, ...] = ()

    def runs_on(self, device: Device) -> bool:
        return device.is_cpu or (device.backend == self.backend and device.kind.startswith(self.chips))


def _mosaic_gpu(module: str) -> Kernel:
    return Kernel(module, "gpu", HOPPER, oldest_jax=(0, 12))


KERNELS: dict[str, dict[str, Kernel]] = {  # by operation, then by name of the attention or the set
    "attention": {
        "pallas-gpu": Kernel("attention_gpu", "gpu", has_run=True),  # on an H100 and an H200, where it is the default
        "mosaic-gpu": _mosaic_gpu("attention_mosaic"),
    },
    "decoder layers": {"mosaic-gpu": _mosaic_gpu("layers_mosaic")},
    "norm and add": {"mosaic-gpu": _mosaic_gpu("add_norm_mosaic")},
    "product by blocks": {"mosaic-gpu": _mosaic_gpu("block_products_mosaic")},
    "delta rule": {"mosaic-gpu": _mosaic_gpu("delta_rule_mosaic"), "pallas-tpu": Kernel("delta_rule_tpu", "tpu")},
}
KERNEL_SETS = ("mosaic-gpu", "pallas-tpu")  # sets of kernels for operations other than attention

# `with use(name):` chooses a set for everything traced inside. For another set, JAX traces a function again.
use = jax.make_user_context(default_value=None)


def find(operation: str, *operands: Any, name: str | None = None) -> Callable[..., Any] | None:
    """Returns `run` of the kernel for an operation; None if there is none, or if it does not take these operands.

    Args:
      name: name of an attention; None: the set in use.
    """
    if name is None:
        name = use.value
        if name not in KERNELS[operation]:
            return None
    kernel = KERNELS[operation][name]
    if jax.__version_info__ < kernel.oldest_jax:
        version = ".".join(map(str, kernel.oldest_jax))
        warn(f"{operation}: kernel {name!r} needs jax {version}; the plain variant runs instead")
        return None
    module = importlib.import_module(f"{__name__}.{kernel.module}")
    if not module.supports(*operands):
        warn(f"{operation}: kernel {name!r} takes {module.TAKES}; for anything else the plain variant runs")
        return None
    if not kernel.has_run:
        warn(f"{operation}: kernel {name!r} never ran on the device that it was written for")
    return module.run


def check_device(setting: str, name: str | None, device: Device) -> None:
    """Raises ValueError if a setting names kernels for another device."""
    for kernels in KERNELS.values():
        if name in kernels and not kernels[name].runs_on(device):
            chips = " or ".join(filter(None, kernels[name].chips)) or f"a {kernels[name].backend}"
            raise ValueError(f"got {setting} {name!r} on {device.kind or device.backend}, expected {chips}; leave it out")
