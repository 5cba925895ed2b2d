"""Transformers' continuous batching for `quire generate`: start it, show tokens as they come, and stop it."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text
from transformers import GenerationConfig, PreTrainedTokenizerBase
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching import ContinuousBatchingManager

from quire.cli.exit_codes import INTERRUPTED

CausalLM = Any  # what AutoModelForCausalLM loads; Transformers types `generate` by a protocol that no model class meets
PATIENCE = 5.0  # seconds that an interrupt waits for the step of the model that is under way


class EngineError(RuntimeError):
    """Transformers' continuous batching gave up."""


def generation_config(model: CausalLM, max_new_tokens: int, temperature: float) -> GenerationConfig:
    """Return how tokens are chosen; temperature 0 takes the likeliest. What ends a text is the model's own choice."""
    own = model.generation_config
    config = GenerationConfig(
        max_new_tokens=max_new_tokens,
        eos_token_id=own.eos_token_id,
        pad_token_id=0 if own.pad_token_id is None else own.pad_token_id,
        do_sample=temperature > 0,
    )
    if temperature > 0:
        config.temperature = temperature
    return config


def stream(
    model: CausalLM,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[str],
    token_ids: list[list[int]],
    config: Any,
    page_size: int,
    console: Console,
    on_interrupt: Callable[[list[list[int]]], None] = lambda tokens: None,
) -> list[list[int]]:
    """Generate for all prompts in one continuously batched run, showing tokens as they come.

    Args:
        model: with Quire installed as its attention.
        tokenizer: the model's.
        prompts: as text.
        token_ids: the prompts' tokens.
        config: from `generation_config`.
        page_size: tokens per page of the cache.
        console: to show them on.
        on_interrupt: called with the new tokens of each prompt so far, before an interrupt stops the engine.

    Returns:
        The new tokens of each prompt.

    Raises:
        EngineError: the engine gave up, with its reason.
    """
    lengths = [len(ids) + config.max_new_tokens for ids in token_ids]
    manager = model.init_continuous_batching(config, batching_config(model, lengths, page_size))
    # Requests that are added after the engine has failed are lost without an error, so they come before its start.
    ids = manager.add_requests(token_ids, max_new_tokens=config.max_new_tokens, streaming=True)
    tokens: dict[str, list[int]] = {i: [] for i in ids}
    unfinished = set(ids)
    display = Display(tokenizer, prompts, config.max_new_tokens * len(ids), console)
    with running(manager):
        try:
            with display.live as live:
                while unfinished:
                    result = manager.get_result(timeout=0.5)
                    if result is None:
                        if not manager.is_running():
                            raise EngineError("its thread ended before all prompts were finished")
                        continue
                    if result.error:
                        raise EngineError(result.error)
                    tokens[result.request_id] = list(result.generated_tokens)
                    if result.is_finished():
                        unfinished.discard(result.request_id)
                    if console.is_terminal:
                        live.update(display.render(list(tokens.values())))
                    else:
                        display.print_new_lines(
                            ids.index(result.request_id), tokens[result.request_id], result.is_finished()
                        )
        except KeyboardInterrupt:
            on_interrupt(list(tokens.values()))
            raise
    return list(tokens.values())


def batching_config(model: CausalLM, lengths: list[int], page_size: int) -> ContinuousBatchingConfig:
    """Return a configuration whose cache holds sequences of these lengths."""
    pages = [-(-length // page_size) + 1 for length in lengths]
    config = ContinuousBatchingConfig(num_blocks=2 * sum(pages) + 8, max_batch_tokens=512)
    setattr(config, "page_size" if hasattr(config, "page_size") else "block_size", page_size)  # renamed in 5.18
    if model.device.type == "cuda":
        config.max_blocks_per_request = max(pages)  # width of the page table of decode
    else:  # where there is a GPU as well, Transformers would try to use it
        config.use_cuda_graph = False
        config.use_async_batching = False
    return config


@contextmanager
def running(manager: ContinuousBatchingManager) -> Iterator[None]:
    """Run the engine's thread within the context; an exception drops the requests that are unfinished.

    A thread cannot be interrupted: an interrupt waits for the step of the model that is under way. If that takes longer
    than PATIENCE, or the user interrupts again, the process ends here. The interpreter would wait for the thread at
    exit, and to interrupt that wait would abort the process.
    """
    try:
        manager.start()
        yield
        manager.stop(block=True)
        manager.destroy()
    except BaseException as error:
        before = signal.signal(signal.SIGINT, end_process)
        try:
            manager.stop(block=True, timeout=PATIENCE, hard_stop=True)
            if isinstance(error, KeyboardInterrupt) and manager.is_running():
                end_process()
        finally:
            signal.signal(signal.SIGINT, before)
        raise


def end_process(*signal_and_frame: object) -> NoReturn:
    """End the process without waiting for threads."""
    os.write(2, b"interrupted\n")
    os._exit(INTERRUPTED)


class Display:
    """Tokens as they come: on a terminal the last line of each text, redrawn; else each line once it is complete.

    Args:
        tokenizer: turns tokens into text.
        prompts: what the texts continue.
        total: tokens at most, of all prompts.
        console: to print on.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompts: list[str], total: int, console: Console) -> None:
        self.tokenizer = tokenizer
        self.prompts = prompts
        self.num_printed = [0] * len(prompts)  # characters
        columns = TextColumn("tokens"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        self.progress = Progress(*columns, console=console)
        self.task = self.progress.add_task("", total=total)
        self.live = Live(self.render([[]] * len(prompts)), console=console, refresh_per_second=12, transient=True)

    def text(self, tokens: list[int]) -> str:
        """Return tokens as text."""
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    def render(self, tokens: list[list[int]]) -> Group:
        """Return the last line of each text, and the progress."""
        self.progress.update(self.task, completed=sum(map(len, tokens)))
        lines = []
        for prompt, some in zip(self.prompts, tokens, strict=True):
            text = (prompt + self.text(some)).splitlines() or [""]
            lines.append(Text(text[-1], overflow="ellipsis", no_wrap=True, style="" if some else "dim"))
        return Group(*lines, self.progress)

    def print_new_lines(self, index: int, tokens: list[int], finished: bool) -> None:
        """Print the lines that a text has completed since the last call, marked with the prompt's number."""
        text = self.text(tokens)
        end = len(text) if finished else text.rfind("\n") + 1
        for line in text[self.num_printed[index] : end].splitlines():
            print(f"[{index}] {line}", flush=True)
        self.num_printed[index] = max(end, self.num_printed[index])
