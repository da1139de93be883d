"""The verifier answers training prompts: the text a drafter has to predict is the verifier's own, not the data set's.

    python -m train.respond --data DIR --tokenizer treeflash_jax/assets/tiny/verifier \\
        --verifier runs/verifier/verifier.npz --out runs/responses.jsonl

Half of the answers are greedy, a quarter each is sampled at temperatures 0.7 and 1. One JSON object a line:
{"source", "temperature", "prompt": ids, "response": ids}.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from train import data
from train.verifier import load, tiny_config
from treeflash_jax.decode import Weights
from treeflash_jax.generate import TreeFlash

COUNTS = {"gsm8k_train": 4900, "mbpp_train": 300, "gpteacher_codegen": 600, "gpteacher_roleplay": 400}
TEMPERATURES = (0.0, 0.7, 0.0, 1.0)  # taken in turn
PROMPT_TOKENS = 192  # longer prompts are left out


def choose_prompts(folder: Path, tokenizer: Tokenizer, seed: int) -> list[tuple[str, list[int]]]:
    """(source, prompt ids) of training documents, sorted by length so that a batch wastes little."""
    rng = np.random.default_rng(seed)
    chosen = []
    for name, count in COUNTS.items():
        kept, _ = data.split(data.conversations(folder, name))
        for index in rng.permutation(len(kept))[:count]:
            prompt = data.chat_prompt(tokenizer, kept[index][:1])
            if len(prompt) <= PROMPT_TOKENS:
                chosen.append((name, prompt))
    return sorted(chosen, key=lambda item: len(item[1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of training JSONL files")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder of tokenizer.json")
    parser.add_argument("--verifier", type=Path, required=True, help="weights that train.verifier wrote")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--batches", type=int, help="stop after this many batches (a trial run)")
    parser.add_argument("--new-tokens", type=int, default=160)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    tokenizer = Tokenizer.from_file(str(args.tokenizer / "tokenizer.json"))
    config = tiny_config(tokenizer)
    model = TreeFlash(config, Weights(verifier=load(args.verifier, config)), stop_ids=config.eos_token_ids)
    prompts = choose_prompts(args.data, tokenizer, args.seed)
    starts = range(0, len(prompts) - args.batch + 1, args.batch)[: args.batches]
    temperatures = np.resize(TEMPERATURES, args.batch).tolist()
    began = time.time()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with args.out.open("w", encoding="utf-8") as file:
        for number, start in enumerate(starts):
            members = prompts[start : start + args.batch]
            results = model.generate(
                [prompt for _, prompt in members],
                method="ar",
                temperature=temperatures,
                seed=args.seed + number,
                max_new_tokens=args.new_tokens,
                batch_size=args.batch,
            )
            for (source, prompt), temperature, result in zip(members, temperatures, results, strict=True):
                line = {"source": source, "temperature": temperature, "prompt": prompt, "response": result.ids}
                file.write(json.dumps(line) + "\n")
            print(f"batch {number + 1} of {len(starts)}, {time.time() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
