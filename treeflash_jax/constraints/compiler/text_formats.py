"""Texts of JSON Schema's formats. All of them are valid, but some valid texts are left out."""

from functools import cache

from treeflash_jax.constraints.compiler.characters import RangeWriter, texts
from treeflash_jax.constraints.compiler.patterns import full_match
from treeflash_jax.constraints.compiler.refusals import Refused
from treeflash_jax.constraints.compiler.terms import Term, concat, intersect, literal, repeat, union

MONTHS_31, MONTHS_30 = "(0[13578]|1[02])", "(0[469]|11)"
DAYS = f"({MONTHS_31}-(0[1-9]|[12]\\d|3[01])|{MONTHS_30}-(0[1-9]|[12]\\d|30)|02-(0[1-9]|1\\d|2[0-8]))"
YEAR = r"(\d{3}[1-9]|\d{2}[1-9]0|\d[1-9]00|[1-9]000)"
LEAP_YEAR = r"(\d\d(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
DATE = f"({YEAR}-{DAYS}|{LEAP_YEAR}-02-29)"
HOUR = r"([01]\d|2[0-3])"
TIME = rf"{HOUR}:[0-5]\d:[0-5]\d(\.\d{{1,6}})?(Z|[+-]{HOUR}:[0-5]\d)"
COUNT = r"\d{1,4}"
CLOCK = f"T({COUNT}H({COUNT}M({COUNT}S)?)?|{COUNT}M({COUNT}S)?|{COUNT}S)"
DURATION = f"P(({COUNT}D|{COUNT}M({COUNT}D)?|{COUNT}Y({COUNT}M({COUNT}D)?)?)({CLOCK})?|{CLOCK}|{COUNT}W)"
BYTE = r"(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
IPV4 = rf"{BYTE}(\.{BYTE}){{3}}"
GROUP = "[0-9a-fA-F]{1,4}"
IPV6_LONG = f"({GROUP}:){{7}}{GROUP}"
IPV6_SHORT = [  # addresses with :: for the zeros after n groups
    f"::({GROUP}(:{GROUP}){{0,6}})?",
    *(f"({GROUP}:){{{n - 1}}}{GROUP}::({GROUP}(:{GROUP}){{0,{6 - n}}})?" for n in range(1, 7)),
    f"({GROUP}:){{6}}{GROUP}::",
]
IPV6 = "|".join([IPV6_LONG, *IPV6_SHORT])
UUID = "[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"
POINTER = "(/([^~/]|~[01])*)*"
PATTERNS = {"date": DATE, "time": TIME, "date-time": f"{DATE}T{TIME}", "duration": DURATION, "ipv4": IPV4, "ipv6": IPV6}
PATTERNS |= {"uuid": UUID, "json-pointer": POINTER, "relative-json-pointer": rf"(0|[1-9]\d*)(#|{POINTER})"}
ATOM = r"[A-Za-z0-9_+-]+(\.[A-Za-z0-9_+-]+)*"  # part before the @ of an address
LABEL = "[A-Za-z0-9]+(-[A-Za-z0-9]+)*"  # label of a host name
MOST_LABEL, MOST_ATOM = 30, 30  # characters
SEGMENT = "([A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})"
ALIKE = {
    "idn-email": "email", "idn-hostname": "hostname", "iri": "uri", "uri-reference": "uri", "iri-reference": "uri",
    "uri-template": "uri",
}  # fmt: skip
REFUSED = ("regex",)


@cache
def format_texts(name: str, writer: RangeWriter) -> Term | None:
    """Returns texts of a format; None for a format that is not in the standard, and thus allows every text.

    Raises Refused for a format that cannot be followed.
    """
    name = ALIKE.get(name, name)
    if name in REFUSED:
        raise Refused(f"format {name!r} cannot be followed")
    if name in PATTERNS:
        return full_match(PATTERNS[name], writer)
    label = intersect(full_match(LABEL, writer), texts(writer, 1, MOST_LABEL))
    host = concat(label, repeat(concat(literal(b"."), label), 1, 3))
    if name == "hostname":
        return union(label, host)
    if name == "email":
        return concat(intersect(full_match(ATOM, writer), texts(writer, 1, MOST_ATOM)), literal(b"@"), host)
    if name == "uri":
        start = full_match(r"[A-Za-z][A-Za-z0-9+.-]*://", writer)
        port = full_match(r"(:\d{1,4})?", writer)
        end = full_match(rf"(/{SEGMENT}*)*(\?({SEGMENT}|[/?])*)?(#({SEGMENT}|[/?])*)?", writer)
        return concat(start, union(label, host), port, end)
    return None
