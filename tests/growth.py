"""Problems whose scores grow or fall over the pages of a sequence, in some rows by more than 2^8 from tile to tile.

Lazily rescaled accumulators are rescaled in some warps and tiles there, and in others not.
"""

import torch

from quire.testing import Problem


def with_growing_scores(problem: Problem, falling: bool = False) -> Problem:
    """Multiply the keys of each sequence, in place, by factors from 0.1 to 30, page by page."""
    page_size = problem.cache.page_size
    for row, seq_len in zip(problem.batch.page_table.tolist(), problem.batch.seq_lens.tolist(), strict=True):
        pages = row[: -(-seq_len // page_size)]
        factors = torch.linspace(0.1, 30.0, max(2, len(pages)))
        for page, factor in zip(pages, factors.flip(0) if falling else factors, strict=False):
            keys = problem.cache.k
            keys[page] = (keys[page].float() * factor).to(keys.dtype)
    return problem
