"""Refusals in one line, and the content of folders before and after them."""

import time

import pytest

from treeflash_jax.core.checks import UnknownSetting


def refused(call, *words: str) -> str:
    """Returns the line with which a call is refused; it has the words and at most 300 printable characters."""
    began = time.thread_time()
    with pytest.raises((ValueError, UnknownSetting, FileNotFoundError, SystemExit)) as caught:
        call()
    message = str(caught.value)
    assert message.isprintable() and len(message) <= 300, message
    assert all(word in message for word in words), message
    assert time.thread_time() - began < 5
    return message


def mistake(capsys, main, words, *texts: str, statuses: tuple[int, ...] = (2,)) -> str:
    """Returns the line on stderr with which a command ends; it contains the texts, and nothing else is printed."""
    try:
        status = main(words)
    except SystemExit as stopped:  # mistakes that the parser finds
        status = stopped.code
    out, error = capsys.readouterr()
    assert status in statuses and out == "" and error.count("\n") == 1 and all(text in error for text in texts), out + error
    return error


def understood(call, *arguments, **settings) -> bool:
    """Returns whether a call was served; a call that is not must be refused in one line."""
    try:
        call(*arguments, **settings)
    except (ValueError, UnknownSetting) as error:
        assert "\n" not in str(error) and len(str(error)) <= 300, str(error)
        return False
    return True


def snapshot(folder) -> dict[str, bytes]:
    """Returns the content of all files below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
