"""Multi-head latent attention: absorbed decode is attention over one cached latent per token, shared by all heads.

MLA expands a latent c into every head's key W_UK·c and value W_UV·c; a rotary key is shared as it is. For one query,
the two matrices move out of attention: W_UKᵀ to the query, W_UV to the output. Attention then reads latents only.

    python examples/mla.py
"""

import torch

import quire

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS, RANK, ROPE, NOPE, VALUE = 8, 64, 16, 32, 32  # DeepSeek-V3: 128, 512, 64, 128, 128
SCALE = (NOPE + ROPE) ** -0.5  # of the heads, and not of the width of latents
CONTEXT, CHUNK, PAGE_SIZE = 200, 6, 16
DTYPE = torch.float32


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=DTYPE, device=DEVICE)


def starts(*lens: int) -> torch.Tensor:
    return torch.tensor([0, *lens], dtype=torch.int32, device=DEVICE).cumsum(0, dtype=torch.int32)


def main() -> None:
    torch.manual_seed(0)
    w_uk, w_uv = numbers(HEADS, NOPE, RANK) / RANK**0.5, numbers(HEADS, VALUE, RANK) / RANK**0.5
    c_kv, k_pe = numbers(CONTEXT, RANK), numbers(CONTEXT, ROPE)  # the last CHUNK tokens are new
    q, q_pe = numbers(CHUNK, HEADS, NOPE), numbers(CHUNK, HEADS, ROPE)

    # Expanded: every head has its own keys and values. They are packed, not paged.
    keys = torch.cat([torch.einsum("hnc,tc->thn", w_uk, c_kv), k_pe[:, None].expand(-1, HEADS, -1)], -1)
    values = torch.einsum("hvc,tc->thv", w_uv, c_kv)
    wide_q = torch.cat([q, q_pe], -1)

    def expanded(begin: int, end: int, causal: bool) -> quire.State:
        spec = quire.AttentionSpec(
            num_q_heads=HEADS,
            num_kv_heads=HEADS,
            head_dim=NOPE + ROPE,
            head_dim_v=VALUE,
            dtype=DTYPE,
            softmax_scale=SCALE,
            causal=causal,
        )
        batch = quire.Batch.varlen(starts(CHUNK), starts(end - begin))
        plan = quire.plan(spec, batch, max_query_len=CHUNK, max_seq_len=end - begin)
        return quire.varlen_attention(wide_q, keys[begin:end], values[begin:end], plan, return_lse=True)

    whole = expanded(0, CONTEXT, causal=True)
    # A chunk of a prompt: the context without a mask, the chunk's own tokens with one, merged by their lse.
    parts = [expanded(0, CONTEXT - CHUNK, causal=False), expanded(CONTEXT - CHUNK, CONTEXT, causal=True)]
    merged = quire.merge_states(parts)

    # Absorbed: the cache holds latents in pages, and all heads read them.
    spec = quire.AttentionSpec.mla(
        num_q_heads=HEADS, softmax_scale=SCALE, kv_lora_rank=RANK, qk_rope_head_dim=ROPE, dtype=DTYPE
    )
    num_pages = -(-CONTEXT // PAGE_SIZE)
    cache = quire.PagedKVCache.empty(spec, num_pages, PAGE_SIZE, device=DEVICE)
    pool = quire.PageAllocator(num_pages, PAGE_SIZE)
    owned = pool.allocate(CONTEXT)
    quire.write_latent(c_kv, k_pe, cache, pool.slot_mapping(owned, CONTEXT, DEVICE))
    lens = torch.tensor([CONTEXT], dtype=torch.int32, device=DEVICE)
    batch = quire.Batch(pool.page_table([owned], device=DEVICE), lens, starts(CHUNK))
    plan = quire.plan(spec, batch, max_query_len=CHUNK, max_seq_len=CONTEXT)
    q_nope = torch.einsum("hnc,thn->thc", w_uk, q)
    latent_out, lse = quire.attention((q_nope, q_pe), cache, plan, return_lse=True)
    absorbed = quire.State(torch.einsum("hvc,thc->thv", w_uv, latent_out), lse)

    per_token = {"expanded": HEADS * (NOPE + ROPE + VALUE), "latent": RANK + ROPE}
    print(f"numbers per token: expanded {per_token['expanded']}, latent {per_token['latent']}")
    print("largest difference from expanded attention over all keys:")
    for name, state in (("absorbed", absorbed), ("chunk merged with its context", merged)):
        difference = max((a - b).abs().max().item() for a, b in zip(state, whole, strict=True))
        print(f"  {name:30}{difference:.1e}")


if __name__ == "__main__":
    main()
