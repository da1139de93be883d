"""Greedy decoding of a GGUF file with llama.cpp, for `treeflash bench run --other`.

    python llama_cpp.py FILE.gguf [--threads 2]

Runs in any environment that has the package xllamacpp (llama.cpp with Python bindings); nothing of this package is needed.
It answers with text instead of ids, which llama.cpp's completions do not give.
"""

import argparse
import json
import sys
import time


def main() -> None:
    import xllamacpp

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    params = xllamacpp.CommonParams()
    params.model.path = arguments.file
    params.n_ctx, params.n_parallel = 2048, 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = arguments.threads
    server = xllamacpp.Server(params)
    for line in sys.stdin:
        question = json.loads(line)
        request = {"prompt": question["prompt"], "max_tokens": question["max_new_tokens"], "temperature": 0.0}
        since = time.perf_counter()
        answer = server.handle_completions(request | {"cache_prompt": False})
        seconds = time.perf_counter() - since
        answer = answer if isinstance(answer, dict) else json.loads(answer)
        count = answer["usage"]["completion_tokens"]
        print(json.dumps({"text": answer["choices"][0]["text"], "tokens": count, "seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
