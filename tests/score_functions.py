"""Functions on scores and masks that several tests use."""

import math

import torch

import quire

CAP, WIDTH = 2.0, 9


@quire.score
def softcap(score):
    return CAP * torch.tanh(score / CAP)


@quire.score(extras={"slopes": ("num_q_heads",)})
def alibi(score, q_pos, kv_pos, q_head, slopes):
    return score - slopes[q_head] * abs(q_pos - kv_pos)


@quire.score(extras={"bias": ("num_q_heads", None)})
def relative(score, q_pos, kv_pos, q_head, bias):
    """A bias by the distance, which is that of the last entry from there on."""
    return score + bias[q_head, q_pos - kv_pos]


@quire.score(extras={"logits": (None, "num_q_heads", None)})
def inkling(score, q_pos, kv_pos, q_head, token, logits):
    """Inkling's relative bias: numbers of each token for the distances before it, and none beyond them."""
    distance = q_pos - kv_pos
    return score + torch.where((distance >= 0) & (distance < 17), logits[token, q_head, distance], 0.0)


@quire.score(extras={"logits": (torch.bfloat16, "num_q_heads", 400)})
def wide(score, q_pos, kv_pos, q_head, logits):
    """Numbers for so many distances that no index of some tiles is out of range."""
    distance = q_pos - kv_pos
    return score + torch.where((distance >= 0) & (distance < 400), logits[q_head, distance], 0.0)


@quire.score(extras={"logits": (torch.bfloat16, None, "num_q_heads", 401)})
def of_tokens(score, q_pos, kv_pos, q_head, token, logits):
    """Numbers of each token for some distances, of rows that begin anywhere in 16 bytes."""
    distance = q_pos - kv_pos
    return score + torch.where((distance >= 0) & (distance < 401), logits[token, q_head, distance], 0.0)


@quire.score(extras={"logits": (torch.float16, None, 152)})
def of_places(score, q_pos, kv_pos, token, logits):
    """Numbers of each token for keys before and after it, of which some are beyond them."""
    shift = 30
    half = score * 0.5
    place = q_pos + shift - kv_pos
    number = torch.where((place < 152) & (place >= 0), logits[token, place], -0.5)
    return half - number * 2.0


@quire.score(extras={"table": (32, "num_q_heads")})
def t5(score, q_pos, kv_pos, q_head, table):
    """T5's buckets: one for each distance below 16, then wider ones up to 128."""
    distance = torch.maximum(q_pos - kv_pos, 0)
    large = 16 + int(torch.log(torch.maximum(distance, 1) / 16) / math.log(128 / 16) * 16)
    bucket = torch.where(distance < 16, distance, torch.minimum(large, 31))
    return score + table[bucket, q_head]


@quire.score(extras={"temperature": (torch.float16, "num_kv_heads"), "by_seq": (None,)})
def tempered(score, kv_head, seq, temperature, by_seq):
    scale = 0.5 + abs(temperature[kv_head])
    kv_head = float(kv_head) + 0.5
    return score * scale + by_seq[seq] * kv_head


@quire.score(extras={"bias": ("num_q_heads",)})
def beyond(score, q_head, bias):
    """An index that has the name of one in range."""
    q_head = q_head + 40
    return score + bias[q_head]


@quire.score(extras={"kind": (torch.int32, None, None)})
def hiding(score, q_pos, kv_pos, q_head, seq, kind):
    """Scores of -inf hide keys: of some rows all, and of some sequences."""
    group = (kv_pos - q_pos) // 3 % 2 + q_head
    hidden = (kind[seq, kv_pos] == 0) | (group % 4 == 3)
    return torch.where(hidden, -math.inf, score)


@quire.mask(extras={"document": (torch.int32, None)})
def same_document(q_pos, kv_pos, document):
    return document[q_pos // 4] == document[kv_pos // 4]


@quire.mask(bounds=lambda q_pos: (q_pos - WIDTH * 2, q_pos - 1))
def dilated(q_pos, kv_pos, q_head):
    return (q_pos - kv_pos) % 2 == q_head & 1


@quire.mask(
    extras={"first": (torch.int32, None)},
    bounds=lambda seq, q_pos, token, first: (first[seq] * 20 + token % 2, q_pos + 3),
)
def from_first(q_pos, kv_pos, first, seq):
    return kv_pos >= first[seq] * 20


@quire.mask(extras={"dense": (torch.bool, None, None)})
def custom(q_pos, kv_pos, dense):
    return dense[q_pos, kv_pos]


@quire.mask
def nothing_for_odd(q_pos, kv_pos):
    return (q_pos % 2 == 0) & (kv_pos >= 0)


@quire.score
def minus_infinity_for_odd(score, q_pos):
    return torch.where(q_pos % 2 == 0, score, float("-inf"))


@quire.mask(bounds=lambda q_pos: (0, q_pos - 15))
def far_behind(q_pos, kv_pos):
    return kv_pos < q_pos - 15


@quire.mask(
    extras={"first": (torch.int32, None), "end": (torch.int32, None)},
    bounds=lambda token, first, end: (first[token], end[token] - 1),
)
def own_interval(kv_pos, token, first):
    return kv_pos >= first[token]


@quire.score
def two_numbers(score, q_pos, kv_pos):
    return score + torch.where((q_pos - kv_pos) % 3 == 1, 0.3, -0.25)


FUNCTIONS = {
    "softcap": {"score": softcap},
    "ALiBi": {"score": alibi},
    "relative bias": {"score": relative},
    "Inkling": {"score": inkling},
    "400 distances": {"score": wide},
    "of tokens": {"score": of_tokens},
    "of places": {"score": of_places},
    "T5": {"score": t5},
    "temperatures": {"score": tempered},
    "beyond": {"score": beyond},
    "scores of -inf": {"score": hiding},
    "documents": {"mask": same_document},
    "dilated, bounds": {"mask": dilated},
    "bounds that read": {"mask": from_first},
    "dense mask": {"mask": custom},
    "all at once": {"score": relative, "mask": dilated, "softcap": 3.0, "alibi": True, "sinks": True},
}
