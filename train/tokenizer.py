"""Trains the shipped pair's tokenizer: byte-level BPE on the training sets, digits apart, a ChatML-like chat template.

    python -m train.tokenizer configs/shipped/tokenizer.toml out=runs/tokenizer

Writes tokenizer.json, tokenizer_config.json and generation_config.json, which `PreTrainedTokenizerFast.from_pretrained`
reads. A source that stands twice among the sources counts twice.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from train import config
from train.records import Source, read
from treeflash_jax import files

PAD, START, END, MASK = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"
SPECIAL_TOKENS = (PAD, START, END, MASK)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """Settings of this stage.

    Attributes:
      sources: chats, of which every message is read, and texts; nothing is held out.
      out: folder to write.
      vocab_size: entries, special tokens included.
      seed: random seed of the order that a source's limit counts in.
    """

    sources: tuple[Source, ...]
    out: str
    vocab_size: int = 2048
    seed: int = 0

    def __post_init__(self) -> None:
        smallest = len(SPECIAL_TOKENS) + 256
        if self.vocab_size < smallest:
            raise ValueError(f"got vocab_size {self.vocab_size}, expected at least {smallest}: special tokens and bytes")


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


def training_texts(sources: Sequence[Source], seed: int) -> Iterator[str]:
    """Every message of chats, and texts as they are."""
    for source in sources:
        if source.format == "responses":
            raise ValueError(f"{source.path}: got responses, which are ids already; expected chats or texts")
        for record in read(source, seed):
            content = record.content
            yield from [content] if isinstance(content, str) else [message["content"] for message in content]


def save(tokenizer: Tokenizer, folder: Path) -> None:
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
    with files.filled(folder) as new:
        files.write(new / "tokenizer.json", tokenizer.to_str(pretty=True))
        for name, content in (("tokenizer_config.json", settings), ("generation_config.json", generation)):
            files.write(new / name, json.dumps(content, indent=2) + "\n")


def main(settings: TokenizerConfig) -> None:
    out = Path(settings.out).expanduser()
    files.check_folder(out)
    tokenizer = train_bpe(training_texts(settings.sources, settings.seed), settings.vocab_size)
    save(tokenizer, out)
    print(f"{tokenizer.get_vocab_size()} entries in {out}")


if __name__ == "__main__":
    config.run(main, TokenizerConfig, __doc__)
