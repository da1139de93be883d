"""Trains the shipped pair's tokenizer: byte-level BPE on the training sets, digits apart, a ChatML-like chat template.

    python -m train.tokenizer --data DIR --out treeflash_jax/assets/tiny/verifier

Writes tokenizer.json, tokenizer_config.json and generation_config.json, which `PreTrainedTokenizerFast.from_pretrained`
reads.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from train import data

PAD, START, END, MASK = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"
SPECIAL_TOKENS = (PAD, START, END, MASK)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def train_bpe(texts: Iterator[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE of `vocab_size` entries, special tokens first; every digit is a token of its own."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def training_texts(folder: Path) -> Iterator[str]:
    """Question and answer text of the chat sets, GSM8K twice for its weight, and a slice of the standard library."""
    for name in ("gsm8k_train", *data.CHAT_SETS):
        for messages in data.conversations(folder, name):
            yield from (message["content"] for message in messages)
    yield from data.stdlib_texts(characters=1_000_000)


def save(tokenizer: Tokenizer, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "mask_token": MASK,
        "additional_special_tokens": [START],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
        "chat_template": CHAT_TEMPLATE,
    }
    generation = {"eos_token_id": tokenizer.token_to_id(END), "pad_token_id": tokenizer.token_to_id(PAD)}
    for name, content in (("tokenizer_config.json", settings), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of training JSONL files")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--vocab-size", type=int, default=2048)
    args = parser.parse_args()
    tokenizer = train_bpe(training_texts(args.data), args.vocab_size)
    save(tokenizer, args.out)
    print(f"{tokenizer.get_vocab_size()} entries in {args.out}")


if __name__ == "__main__":
    main()
