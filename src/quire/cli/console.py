"""The console and the progress bar of commands: rich's, made to work with closed pipes and plain encodings."""

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class CommandConsole(Console):
    """A console that raises BrokenPipeError as `print` does, and draws in ASCII where the output is not in UTF-8."""

    def on_broken_pipe(self) -> None:
        """Leave the exit code to `quire.cli.main`; rich would exit with 1."""
        raise BrokenPipeError

    @property
    def encoding(self) -> str:
        """Encoding of the output; rich takes it for UTF-8."""
        return (getattr(self.file, "encoding", None) or "utf-8").lower()


def progress_bar(console: Console) -> Progress:
    """Return a progress bar that shows the time left, and disappears when it is done."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console, transient=True)
