"""Train the small language model that Quire ships, on the sources of Python's standard library.

The script trains a byte-level BPE tokenizer and a Llama with grouped-query attention, in minutes on a GPU.
On a CPU a few steps show that it runs.
It keeps the weights with the lowest validation loss.
It writes a checkpoint folder for `AutoModelForCausalLM` and `AutoTokenizer`.

    python scripts/train_demo_model.py --output src/quire/demo_model            # a GPU, minutes
    python scripts/train_demo_model.py --output /tmp/tiny --steps 3 --batch 2   # a CPU, a trial
"""

import argparse
import datetime
import json
import math
import platform
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

LEFT_OUT = {"site-packages", "dist-packages", "lib2to3", "pydoc_data", "encodings", "__pycache__", "__phello__"}
PROMPTS = ('def read_lines(path):\n    """', "import os\n\n\nclass ", "    for key, value in ", "def __init__(self")


def read_corpus() -> tuple[list[str], list[str]]:
    """Return the texts of the training files and of the validation files, which are every twentieth file."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [path for path in sorted(root.rglob("*.py")) if not LEFT_OUT & set(path.relative_to(root).parts)]
    texts = [text for path in files if len(text := path.read_text(encoding="utf-8", errors="ignore")) > 200]
    return [text for i, text in enumerate(texts) if i % 20], texts[::20]


def train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer with two special tokens: the begin and the end of a file."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<bos>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", tokenizer.token_to_id("<bos>"))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<eos>",
        clean_up_tokenization_spaces=False,
    )


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[str], device: str) -> torch.Tensor:
    """Return the tokens of all files, one file after the other, with <bos> before and <eos> after each."""
    bos, eos = special_tokens(tokenizer)
    files: Any = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return torch.tensor([token for tokens in files for token in (bos, *tokens, eos)], device=device)


def special_tokens(tokenizer: PreTrainedTokenizerFast) -> tuple[int, int]:
    """Return the ids of <bos> and <eos>."""
    ids = tokenizer.get_vocab()
    return ids["<bos>"], ids["<eos>"]


def make_config(tokenizer: PreTrainedTokenizerFast, vocab_size: int) -> LlamaConfig:
    """Return the configuration of the Llama, which has 3.5 million parameters with a vocabulary of 2,048."""
    bos, eos = special_tokens(tokenizer)
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=8,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=bos,
        eos_token_id=eos,
        pad_token_id=eos,
    )


def learning_rate_factor(step: int, warmup: int, steps: int) -> float:
    """Return the factor on the learning rate: a linear warm-up, then a cosine from 1 to 0.02."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.02 + 0.49 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def next_token_loss(model: LlamaForCausalLM, window: torch.Tensor) -> torch.Tensor:
    """Return the mean loss in nats of predicting each token of [batch, context + 1] from the tokens before it."""
    logits = model(window[:, :-1], use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), window[:, 1:].flatten())


def validation_loss(model: LlamaForCausalLM, tokens: torch.Tensor, context: int) -> float:
    """Return the mean loss in nats per token over consecutive windows of the held-out tokens."""
    model.eval()
    windows = tokens[: len(tokens) // (context + 1) * (context + 1)].view(-1, context + 1)
    total = 0.0
    with torch.no_grad(), torch.autocast(tokens.device.type, torch.bfloat16):
        for part in windows.split(64):
            total += next_token_loss(model, part).item() * len(part)
    model.train()
    return total / len(windows)


def main() -> None:
    """Train, and write the checkpoint, a record of the training, and a few continuations."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="checkpoint folder to write")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--batch", type=int, default=64, help="windows per step")
    parser.add_argument("--context", type=int, default=768, help="tokens per window")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--minutes", type=float, default=6.0, help="stop after this long, even if steps are left")
    args = parser.parse_args()

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    train_texts, validation_texts = read_corpus()
    tokenizer = train_tokenizer(train_texts, args.vocab)
    train, validation = encode(tokenizer, train_texts, device), encode(tokenizer, validation_texts, device)
    validation_bytes = sum(len(t.encode()) for t in validation_texts)
    print(f"{len(train_texts)} files, {len(train):,} tokens to train on, {len(validation):,} held out")
    if device == "cpu":
        validation = validation[: 8 * (args.context + 1)]

    # Any: transformers decorates these methods in ways that type checkers do not follow.
    model: Any = LlamaForCausalLM(make_config(tokenizer, args.vocab))
    model.to(device)
    parameters = sum(p.numel() for p in model.parameters())
    decay = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}],
        args.learning_rate,
        betas=(0.9, 0.95),
        fused=True,
    )
    warmup = max(1, min(200, args.steps // 4))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, warmup, args.steps))
    offsets = torch.arange(args.context + 1, device=device)
    best, best_step, best_state, best_train, start = math.inf, 0, {}, 0.0, time.time()
    bar = tqdm(range(args.steps), mininterval=2, ncols=110)
    for step in bar:
        starts = torch.randint(len(train) - args.context - 1, (args.batch, 1), device=device)
        window = train[starts + offsets]
        with torch.autocast(device, torch.bfloat16):
            loss = next_token_loss(model, window)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        is_late = time.time() - start > 60 * args.minutes
        if (step + 1) % 200 == 0 or step + 1 == args.steps or is_late:
            held_out = validation_loss(model, validation, args.context)
            bar.set_postfix(train=f"{loss.item():.3f}", validation=f"{held_out:.3f}")
            if held_out < best:
                best, best_step, best_train = held_out, step + 1, loss.item()
                best_state = {name: p.detach().clone() for name, p in model.state_dict().items()}
        if is_late or step + 1 - best_step >= 1000:  # no better for 1,000 steps: it overfits
            break
    model.load_state_dict(best_state)
    bits_per_byte = best * len(encode(tokenizer, validation_texts, "cpu")) / validation_bytes / math.log(2)

    model.to(torch.bfloat16).save_pretrained(args.output)
    tokenizer.save_pretrained(args.output)
    record = {
        "parameters": parameters,
        "corpus": f"standard library of Python {platform.python_version()}, {len(train_texts)} files to train on",
        "train_tokens": len(train),
        "validation_tokens": len(validation),
        "tokens_seen": best_step * args.batch * args.context,
        "steps": best_step,
        "train_loss": round(best_train, 4),
        "validation_loss": round(best, 4),
        "validation_bits_per_byte": round(bits_per_byte, 4),
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.processor() or "cpu",
        "torch": torch.__version__,
        "seconds": round(time.time() - start),
        "date": str(datetime.date.today()),
    }
    (args.output / "training.json").write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record, indent=2))
    model.float().eval()
    for prompt in PROMPTS:
        ids = torch.tensor([tokenizer(prompt)["input_ids"]], device=device)
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=80, do_sample=False)
        print("-" * 80, tokenizer.decode(out[0], skip_special_tokens=True), sep="\n")


if __name__ == "__main__":
    main()
