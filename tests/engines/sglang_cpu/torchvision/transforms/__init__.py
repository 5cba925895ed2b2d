"""Names that SGLang imports and that no test calls."""


def __getattr__(name: str) -> type:
    """Return a class of that name, with any attribute that a default argument asks for."""
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {"BICUBIC": 3, "BILINEAR": 2, "NEAREST": 0, "RGB": 0})
