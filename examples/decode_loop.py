"""A serving loop of your own: read three prompts, then write one token per sequence and step.

The model has random weights, so it writes nonsense. Its layers call attention as real ones do. A step has four parts:

1. pages for the new tokens (`PageAllocator`),
2. a `Batch`: the pages and the query tokens of each sequence,
3. a `Plan`, made once per step and used by every layer,
4. in each layer, `write_kv` for the new keys and values, then `attention`.

At the end, the same model reads each finished text without a cache and has to predict the same tokens.

    python examples/decode_loop.py
"""

from collections.abc import Callable

import torch
from torch.nn.functional import rms_norm, scaled_dot_product_attention

import quire

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NUM_LAYERS, VOCABULARY, WIDTH = 2, 100, 64
PROMPT_LENS, NUM_NEW_TOKENS = (5, 40, 17), 12
NUM_PAGES, PAGE_SIZE = 32, 16

SPEC = quire.AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32)
HEADS = (SPEC.num_q_heads, SPEC.num_kv_heads, SPEC.num_kv_heads)  # of queries, keys and values


class ToyModel:
    """A decoder without a feed-forward part. `attend(layer, q, k, v)` is the only place that knows about a cache."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)

        def weight(rows: int, columns: int) -> torch.Tensor:
            return (torch.randn(rows, columns, generator=generator) * rows**-0.5).to(DEVICE)

        self.embedding = weight(VOCABULARY, WIDTH) * VOCABULARY**0.5
        self.to_qkv = [weight(WIDTH, sum(HEADS) * SPEC.head_dim) for _ in range(NUM_LAYERS)]
        self.to_width = [weight(SPEC.num_q_heads * SPEC.head_dim, WIDTH) for _ in range(NUM_LAYERS)]
        self.to_logits = weight(WIDTH, VOCABULARY)

    def __call__(self, tokens: list[int], attend: Callable[..., torch.Tensor]) -> torch.Tensor:
        """Return the logits that follow each token, [num_tokens, VOCABULARY]."""
        x = self.embedding[torch.tensor(tokens, device=DEVICE)]
        for layer in range(NUM_LAYERS):
            qkv = rms_norm(x, (WIDTH,)) @ self.to_qkv[layer]
            q, k, v = qkv.unflatten(-1, (-1, SPEC.head_dim)).split(HEADS, dim=1)  # each [num_tokens, heads, head_dim]
            x = x + attend(layer, q, k, v).flatten(1) @ self.to_width[layer]
        return rms_norm(x, (WIDTH,)) @ self.to_logits


def attend_without_cache(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attend within one text: PyTorch's attention, which reads every key again for each new token."""
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)


def int32(numbers: list[int]) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


def main() -> None:
    model = ToyModel()
    caches = [quire.PagedKVCache.empty(SPEC, NUM_PAGES, PAGE_SIZE, device=DEVICE) for _ in range(NUM_LAYERS)]
    pool = quire.PageAllocator(NUM_PAGES, PAGE_SIZE)  # the layers' caches have the same page numbers
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(VOCABULARY, (length,), generator=generator).tolist() for length in PROMPT_LENS]
    sequences = [pool.allocate(length) for length in PROMPT_LENS]

    def step(new_tokens: list[list[int]]) -> list[int]:
        """Run the model on each sequence's new tokens; return the token that follows each sequence."""
        query_lens, seq_lens = [len(t) for t in new_tokens], [s.num_tokens for s in sequences]
        ends = torch.tensor(query_lens).cumsum(0)
        batch = quire.Batch(
            page_table=pool.page_table(sequences, device=DEVICE),
            seq_lens=int32(seq_lens),  # the new tokens are included
            cu_seqlens_q=int32([0, *ends.tolist()]),
        )
        # Bounds are numbers that the host has already, so planning never waits for a GPU.
        plan = quire.plan(
            SPEC, batch, max_query_len=max(query_lens), max_seq_len=max(seq_lens), num_tokens=sum(query_lens)
        )
        slots = [pool.slot_mapping(s, n, DEVICE) for s, n in zip(sequences, query_lens, strict=True)]
        slot_mapping = torch.cat(slots)  # where each new token's keys and values go

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            quire.write_kv(k, v, caches[layer], slot_mapping)
            return quire.attention(q, caches[layer], plan)

        logits = model([token for tokens in new_tokens for token in tokens], attend)
        return logits[ends.to(DEVICE) - 1].argmax(-1).tolist()

    new_tokens = texts  # the first step reads all prompts at once; the later ones read one token per sequence
    for _ in range(NUM_NEW_TOKENS):
        chosen = step(new_tokens)
        texts = [[*text, token] for text, token in zip(texts, chosen, strict=True)]
        new_tokens = [[token] for token in chosen]
        for sequence in sequences:
            pool.grow(sequence, 1)  # takes a new page now and then; a server would catch OutOfPagesError

    for length, text, sequence in zip(PROMPT_LENS, texts, sequences, strict=True):
        print(f"prompt of {length} tokens on pages {sequence.pages}: {text[length:]}")
        predicted = model(text, attend_without_cache)[length - 1 : -1].argmax(-1).tolist()
        assert predicted == text[length:], f"without a cache the model predicts {predicted}"
        pool.free(sequence)
    print(f"the same tokens as without a cache; {pool.num_free_pages} of {NUM_PAGES} pages are free again")


if __name__ == "__main__":
    main()
