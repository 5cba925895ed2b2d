"""A stand-in for IPython, of which SGLang imports the display."""
