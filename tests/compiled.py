"""What compiled programs are looked through for."""

from __future__ import annotations

import re


def copies_in_loops(program, shape: tuple[int, ...]) -> list[str]:
    """Lines of a compiled program, outside its entry, that copy a float32 array of this shape."""
    inside, copies = "", []
    copy = re.compile(rf"= f32\[{','.join(map(str, shape))}\]\S* copy\(")
    for line in program.as_text().splitlines():
        inside = line if line.endswith("{") and not line.startswith(" ") else inside
        copies += [line] if copy.search(line) and "ENTRY" not in inside else []
    return copies
