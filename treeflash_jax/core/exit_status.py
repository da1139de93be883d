"""The exit status of a command line: bad input ends it with one line on stderr, and a reader that has ended quietly."""

import os
import sys
from collections.abc import Callable

import jax

from treeflash_jax.core.checks import UnknownSetting, clipped


def exit_status(command: Callable[[], int | None], name: str) -> int:
    """Runs a command and returns its exit status: its own or 0, 2 for bad input, 130 after Ctrl-C, 141 for a closed pipe.

    Args:
      name: name of the command, with which the line about bad input begins.
    """
    try:
        try:
            return command() or 0
        finally:
            sys.stdout.flush()  # here, where a closed pipe is noticed
    except BrokenPipeError:  # the program that reads the output has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        return 130
    except (ValueError, UnknownSetting, OSError) as error:
        print(f"{name}: error: {clipped(error)}", file=sys.stderr)
    except (RuntimeError, AssertionError):  # both are what JAX raises without devices
        if _has_devices():
            raise
        platforms = os.environ.get("JAX_PLATFORMS")
        expected = "expected one that this machine has, such as JAX_PLATFORMS=cpu"
        print(f"{name}: error: got JAX_PLATFORMS={platforms}, {expected}", file=sys.stderr)
    return 2


def _has_devices() -> bool:
    try:
        return bool(jax.local_devices())
    except (RuntimeError, AssertionError):
        return False
