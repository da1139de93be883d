"""Writes the trained pair as two Hugging Face folders, bf16 on disk.

    python -m train.export --run runs --out treeflash_jax/assets/tiny

RUN holds verifier/verifier.npz, drafter/drafter.npz and head/head.npz; OUT/verifier holds the tokenizer already.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import jax.numpy as jnp
from tokenizers import Tokenizer

from train import checkpoint
from train.drafter import tiny_drafter_config
from train.verifier import load, tiny_config
from treeflash_jax import drafter, hf
from treeflash_jax import params as parameters
from treeflash_jax.heads import HEADS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="folder of the three training runs")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()

    tokenizer = Tokenizer.from_file(str(args.out / "verifier" / "tokenizer.json"))
    own = tiny_config(tokenizer)
    config = tiny_drafter_config(own, tokenizer)
    head_specs = HEADS[config.head].specs(config)
    backbone = checkpoint.load(
        args.run / "drafter" / "drafter.npz", parameters.abstract(drafter.specs(config), jnp.float32)
    )
    head = checkpoint.load(args.run / "head" / "head.npz", parameters.abstract(head_specs, jnp.float32))
    hf.save_verifier(args.out / "verifier", own, load(args.run / "verifier" / "verifier.npz", own))
    hf.save_drafter(args.out / "drafter", config, backbone, head)
    for path in sorted(args.out.rglob("*.safetensors")):
        print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
