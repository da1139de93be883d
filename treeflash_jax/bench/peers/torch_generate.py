"""Greedy decoding with transformers' `generate`, for `treeflash bench run --other`.

    python torch_generate.py FOLDER [--dtype bfloat16] [--prompt-lookup 10] [--threads 2]

Runs in any environment that has torch and transformers; nothing of this package is needed. FOLDER is a Hugging Face model
folder (`treeflash convert` writes one from a GGUF file).
"""

import argparse
import json
import sys
import time


def main() -> None:
    import torch
    from transformers import AutoModelForCausalLM

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--prompt-lookup", type=int, default=0, help="tokens drafted by prompt lookup; 0: no drafting")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model = AutoModelForCausalLM.from_pretrained(arguments.folder, dtype=getattr(torch, arguments.dtype)).eval()
    settings = {"prompt_lookup_num_tokens": arguments.prompt_lookup} if arguments.prompt_lookup else {}
    for line in sys.stdin:
        question = json.loads(line)
        prompt = torch.tensor([question["prompt"]])
        settings |= {"max_new_tokens": question["max_new_tokens"], "eos_token_id": question["stop_ids"] or None}
        since = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, **settings)
        seconds = time.perf_counter() - since
        ids = out[0, prompt.shape[1] :].tolist()
        print(json.dumps({"ids": ids, "seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
