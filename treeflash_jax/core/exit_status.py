"""Exit statuses of command lines.

Bad input and too little memory end a command with one line on stderr; a closed pipe ends it quietly.
"""

import os
import sys
from collections.abc import Callable

import jax

from treeflash_jax.core.checks import UnknownSetting
from treeflash_jax.core.error_text import clipped


def exit_status(command: Callable[[], int | None], name: str) -> int:
    """Runs a command and returns its exit status.

    The status is 2 for bad input and too little memory, 130 after Ctrl-C and 141 for a closed pipe. Otherwise it is the
    command's result, or 0.

    Args:
      name: name of the command. The line about bad input begins with it.
    """
    try:
        try:
            return command() or 0
        finally:
            sys.stdout.flush()  # a closed pipe raises here, inside the `try`
    except BrokenPipeError:  # the program that reads the output has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        return 130
    except (ValueError, UnknownSetting, OSError) as error:
        print(f"{name}: error: {clipped(error)}", file=sys.stderr)
    except (RuntimeError, AssertionError) as error:  # JAX raises either without devices
        if "RESOURCE_EXHAUSTED" in str(error):
            less = "use a smaller batch, context or dtype, or a mesh of more devices"
            print(f"{name}: error: got too little memory on the device ({clipped(error, 160)}); {less}", file=sys.stderr)
            return 2
        if _has_devices():
            raise
        got = f"JAX found no device ({clipped(str(error) or type(error).__name__, 160)}); set"
        if platforms := os.environ.get("JAX_PLATFORMS"):
            got = f"got JAX_PLATFORMS={platforms}, expected one that this machine has, such as"
        print(f"{name}: error: {got} JAX_PLATFORMS=cpu", file=sys.stderr)
    return 2


def _has_devices() -> bool:
    try:
        return bool(jax.local_devices())
    except (RuntimeError, AssertionError):
        return False
