"""The progress bar of commands: rich's, and lines on standard error where the output is no terminal."""

import sys
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

STEPS_PER_LINE, MAX_LINES = 10, 100  # of a task, where the output is no terminal


class CommandProgress(Progress):
    """A progress bar, or where the output is no terminal a line on standard error for every ten steps of a task.

    A task of more than a thousand steps has a hundred lines.
    """

    def add_task(
        self,
        description: str,
        start: bool = True,
        total: float | None = 100.0,
        completed: int = 0,
        visible: bool = True,
        **fields: Any,
    ) -> TaskID:
        """Add a task, whose name here is that of its lines."""
        task = super().add_task(description, start, total, completed, visible, name=description, **fields)
        self._print_line(task, None)
        return task

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        """Count steps of a task."""
        before = self._task(task_id).completed
        super().advance(task_id, advance)
        self._print_line(task_id, before)

    def update(self, task_id: TaskID, **changes: Any) -> None:
        """Change a task, and count its steps."""
        before = self._task(task_id).completed
        super().update(task_id, **changes)
        self._print_line(task_id, before)

    def _task(self, task_id: TaskID) -> Task:
        return next(task for task in self.tasks if task.id == task_id)

    def _print_line(self, task_id: TaskID, before: float | None) -> None:
        """Print how far a task is, unless there is a bar or the last line says it."""
        task = self._task(task_id)
        total = int(task.total or 0)
        every = max(STEPS_PER_LINE, total // MAX_LINES)
        is_next = before is None or before // every < task.completed // every or before < task.completed == total
        if is_next and not self.console.is_terminal:
            print_step(f"{task.fields['name']}, {task.completed:.0f} of {total} done")


def print_step(step: str) -> None:
    """Print what is being done on standard error, for a reader of the output who sees no progress bar."""
    if sys.stderr is not None:
        print(step, file=sys.stderr, flush=True)


def progress_bar(console: Console) -> Progress:
    """Return a progress bar that shows the time left, and disappears when it is done; see `CommandProgress`."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    return CommandProgress(*columns, console=console, transient=True)
