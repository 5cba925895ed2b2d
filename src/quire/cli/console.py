"""The console of commands: rich's, made to work with closed pipes and plain encodings."""

from rich.console import Console


class CommandConsole(Console):
    """A console that raises BrokenPipeError as `print` does, and draws in ASCII where the output is not in UTF-8."""

    def on_broken_pipe(self) -> None:
        """Leave the exit code to `quire.cli.main`; rich would exit with 1."""
        raise BrokenPipeError

    @property
    def encoding(self) -> str:
        """Encoding of the output; rich takes it for UTF-8."""
        return (getattr(self.file, "encoding", None) or "utf-8").lower()
