"""Commands with which tests run an extension of the library."""

import json

from answers import drafted_as_plain

import treeflash_jax as tf
from treeflash_jax.cli.commands import main

CHAT = [{"role": "user", "content": "Ada has 3 pens and buys 5 more. How many pens has she?"}]
SMALL = {"nodes": 4, "candidates": 2, "children": 2}
OPTIONS = [f"--{name}={value}" for name, value in SMALL.items()]
ASK = ["--chat", CHAT[0]["content"]]


def generated(capsys, *words: str) -> list[int]:
    """Token ids of `treeflash generate --json`."""
    assert main(["generate", *words, "--max-new-tokens", "12", "--json"]) == 0
    return json.loads(capsys.readouterr().out)["ids"]


def goes_through_everything(model: tf.TreeFlash, folder, tmp_path, capsys, settings=SMALL, verifier="tiny") -> None:
    """Python, the command line, and benchmarks."""
    options = [f"--{name}={value}" for name, value in settings.items()]
    [result] = drafted_as_plain(model, [CHAT], settings, max_new_tokens=12)
    pair = ["--verifier", str(verifier), "--drafter", str(folder)]
    assert generated(capsys, *pair, *ASK, *options) == result.ids
    results, prompts = tmp_path / "results.jsonl", tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"id": 1, "turns": [CHAT[0]["content"]]}) + "\n")
    words = [*pair, "--systems", "ar", "treeflash", "--prompts", str(prompts), *options]
    assert main(["bench", "run", *words, "--max-new-tokens", "8", "--out", str(results)]) == 0
    assert main(["bench", "report", str(results)]) == 0
    assert "treeflash" in capsys.readouterr().out
    words = [*pair, "--context", "20", "--repeats", "1", *options]
    assert main(["bench", "latency", *words, "--out", str(tmp_path / "latency.json")]) == 0
    shape = verifier if verifier == "tiny" else verifier / "config.json"
    words = ["--shape", str(shape), "--drafter-shape", str(folder / "config.json"), "--no-compile", "--dtype", "float32"]
    assert main(["bench", "memory", *words]) == 0
