"""Greedy decoding with the published PyTorch code of TreeFlash (arXiv 2606.03819), for `treeflash bench run --other`.

    python published.py VERIFIER DRAFTER --code FOLDER [--nodes 64] [--dtype bfloat16]

Runs in any environment that has torch and transformers; nothing of this package is needed. VERIFIER and DRAFTER are Hugging
Face model folders, and --code is a clone of github.com/ETH-DISCO/TreeFlash. Without --nodes it decodes one token at a time.
A GPU is used if there is one.
"""

import argparse
import json
import sys
import time


def main() -> None:
    import torch
    from transformers import AutoModelForCausalLM

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verifier")
    parser.add_argument("drafter")
    parser.add_argument("--code", required=True)
    parser.add_argument("--nodes", type=int, help="tree nodes verified per round, root included")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    arguments = parser.parse_args()
    sys.path.insert(0, arguments.code)
    from tree_flash import TreeFlash

    dtype = getattr(torch, arguments.dtype)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    verifier = AutoModelForCausalLM.from_pretrained(arguments.verifier, dtype=dtype).to(device)
    drafter = TreeFlash.from_pretrained(arguments.drafter, dtype=dtype).to(device)
    settings = {"is_vanilla": True} if arguments.nodes is None else {"tree_size": arguments.nodes}
    for line in sys.stdin:
        question = json.loads(line)
        prompt = torch.tensor([question["prompt"]])
        settings |= {"max_new_tokens": question["max_new_tokens"], "stop_token_ids": question["stop_ids"] or None}
        since = time.perf_counter()
        ids = drafter.spec_generate(verifier, prompt, **settings)[0, prompt.shape[1] :].tolist()
        print(json.dumps({"ids": ids, "seconds": time.perf_counter() - since}), flush=True)


if __name__ == "__main__":
    main()
