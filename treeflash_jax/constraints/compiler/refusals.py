"""The error for constraints that cannot be followed."""


class Refused(Exception):
    """Raised for a constraint that cannot be followed. `what` names the reason, and `path` is its JSON pointer."""

    def __init__(self, what: str, path: str | None = None):
        super().__init__(what)
        self.what, self.path = what, path

    def __str__(self) -> str:
        return self.what if self.path is None else f"{self.what}, at {self.path}"
