"""Names that SGLang imports and that no test calls."""

HTML = Image = display = clear_output = None
