"""What launches take, by events, of plans that are made while the logger `quire.launch` speaks.

Each new decision is timed over a few calls, and the least time is said once. The host never waits for events: a later
call, or a later plan, asks whether they are over.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from quire import log
from quire.kernels.capture import is_capturing
from quire.kernels.launch import Launch, Runner
from quire.kernels.ranges import within

CALLS = 5  # that are timed of a decision, after a first one, which may compile
MOST = 256  # decisions that are timed at a time
TIMED: dict[Any, "Timing"] = {}  # by decision, until its time is said


class HostEvent:
    """Stands in for an event of `torch.cuda` where calls return when they are done."""

    def record(self, stream: None) -> None:
        """Keep the time."""
        self.seconds = time.perf_counter()

    def query(self) -> bool:
        """Return whether the event is over."""
        return True

    def elapsed_time(self, end: "HostEvent") -> float:
        """Return the ms from this event to another."""
        return (end.seconds - self.seconds) * 1e3


class Timing:
    """The times of a decision's calls.

    Args:
        decision: what is said once.
        words: what was asked for and decided, in words.
        predicted_us: what the plan predicts, or None where it predicts nothing.
        device: of the batch.
    """

    def __init__(self, decision: Any, words: str, predicted_us: float | None, device: torch.device) -> None:
        self.decision, self.words, self.predicted_us, self.device = decision, words, predicted_us, device
        self.calls: list[tuple[Any, Any]] = []

    @contextmanager
    def call(self) -> Iterator[None]:
        """Time a call, unless enough were, or a graph is being captured, which runs nothing and answers no event."""
        if is_capturing(self.device):
            yield
            return
        if len(self.calls) > CALLS:
            yield
        else:
            gpu = self.device.type == "cuda"
            begin, end = (torch.cuda.Event(enable_timing=True) if gpu else HostEvent() for _ in range(2))
            stream: Any = torch.cuda.current_stream(self.device) if gpu else None
            begin.record(stream)
            yield
            end.record(stream)
            self.calls.append((begin, end))
        self.say_if_over()

    def say_if_over(self) -> None:
        """Say the least time, once all calls are over."""
        if len(self.calls) <= CALLS or self.decision not in TIMED or not self.calls[-1][1].query():
            return
        del TIMED[self.decision]
        least = min(begin.elapsed_time(end) for begin, end in self.calls[1:])
        predicted = "" if self.predicted_us is None else f", {log.micros(self.predicted_us)} predicted"
        line = f"{self.words}: {log.micros(least * 1e3)} µs, the least of {CALLS} calls{predicted}"
        log.say_once(log.LAUNCH, line, self.decision)


def timed(runner: Runner, launch: Launch, words: str, predicted_us: float | None, device: torch.device) -> Runner:
    """Return a runner whose calls are timed; the runner itself if the decision was timed, or is for other bounds.

    Args:
        runner: of a plan.
        launch: of the plan.
        words: the batch and its bounds, in words.
        predicted_us: what the plan predicts, or None where it predicts nothing.
        device: of the batch.
    """
    if not is_capturing(device):
        for timing in [*TIMED.values()]:
            timing.say_if_over()
    spec = launch.request.spec
    decision = spec, f"{launch}"
    if log.was_said(log.LAUNCH, decision):
        return runner
    words = f"{words}, {log.words_of(spec)} -> {launch}"
    timing = TIMED.get(decision)
    if timing is None:
        if len(TIMED) >= MOST:
            del TIMED[next(iter(TIMED))]
        timing = TIMED[decision] = Timing(decision, words, predicted_us, device)
    return within(runner, timing.call) if timing.words == words else runner
