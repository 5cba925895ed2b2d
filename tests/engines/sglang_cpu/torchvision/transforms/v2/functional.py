"""Names that SGLang imports and that no test calls."""


class Named(type):
    """The type of a stand-in, whose attributes are their own names."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


def __getattr__(name: str) -> type:
    """Return a class of that name."""
    if name.startswith("__"):
        raise AttributeError(name)
    return Named(name, (), {})
