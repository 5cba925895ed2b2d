"""One line that says what a command is doing, and for how long, for commands that must not need rich."""

import shutil
import sys
import threading
import time
from types import TracebackType

INTERVAL = 0.5  # seconds between two updates of the time


class StatusLine:
    """Show a step and its time on the last line of standard error, where that is a terminal; else nothing.

    Within the context, print with `say`, which keeps the line below what is printed.
    """

    def __init__(self) -> None:
        self.stream = sys.stderr
        self.is_shown = self.stream is not None and self.stream.isatty()
        self.step, self.begun = "", time.perf_counter()
        self.lock, self.is_over = threading.Lock(), threading.Event()
        self.thread = threading.Thread(target=self._tick, daemon=True)

    def __enter__(self) -> "StatusLine":
        if self.is_shown:
            self.thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.is_shown:
            self.is_over.set()
            self.thread.join()
            self._erase()

    def __call__(self, step: str, restart: bool = True) -> None:
        """Name the step that begins; its time begins at 0 unless `restart` is False."""
        with self.lock:
            self.step = step
            if restart:
                self.begun = time.perf_counter()
            self._draw()

    def say(self, text: str) -> None:
        """Print a line on standard output, at once."""
        with self.lock:
            self._erase()
            print(text, flush=True)
            self._draw()

    def _tick(self) -> None:
        while not self.is_over.wait(INTERVAL):
            with self.lock:
                self._draw()

    def _draw(self) -> None:
        if self.is_shown and self.step:
            text = f"{self.step}, {time.perf_counter() - self.begun:.0f} s"
            width = shutil.get_terminal_size().columns - 1
            self.stream.write(f"\r\x1b[K{text[:width]}")
            self.stream.flush()

    def _erase(self) -> None:
        if self.is_shown:
            self.stream.write("\r\x1b[K")
            self.stream.flush()
