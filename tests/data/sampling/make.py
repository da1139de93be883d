"""Writes transformers.npz: logits before and after the processors of transformers 5.24.0, in the order of its `generate`.

    pip install torch transformers && python make.py

Arrays have a row per case. An answer of `count` tokens follows a prompt of `prompt` tokens in `ids`.
"""

import numpy as np
import torch
from transformers.generation import logits_process as hf

CASES, VOCABULARY, LENGTH, STOPS = 48, 40, 24, (3, 7)
rng = np.random.default_rng(0)
saved: dict[str, list] = {}
for _ in range(CASES):
    logits = rng.normal(size=VOCABULARY) * 3
    prompt, count = rng.integers(1, 12), rng.integers(0, 12)
    ids = rng.integers(0, VOCABULARY, LENGTH)
    bias = {int(token): float(rng.normal() * 2) for token in rng.choice(VOCABULARY, 3, replace=False)}
    settings = {
        "repetition_penalty": float(rng.choice([1.0, 1.05, 1.3, 0.8])),
        "min_new_tokens": int(rng.choice([0, 4, 11])),
        "temperature": float(rng.choice([0.6, 1.0, 1.7])),
        "top_k": int(rng.choice([0, 5, 20])),
        "top_p": float(rng.choice([1.0, 0.95, 0.6])),
        "min_p": float(rng.choice([0.0, 0.02, 0.3])),
    }
    processors = [
        hf.SequenceBiasLogitsProcessor({(token,): value for token, value in bias.items()}),
        hf.RepetitionPenaltyLogitsProcessor(settings["repetition_penalty"]),
        hf.MinNewTokensLengthLogitsProcessor(int(prompt), settings["min_new_tokens"], list(STOPS)),
    ]
    filters = [hf.TemperatureLogitsWarper(settings["temperature"])]
    filters += [hf.TopKLogitsWarper(settings["top_k"])] if settings["top_k"] else []
    filters += [hf.TopPLogitsWarper(settings["top_p"])] if settings["top_p"] < 1 else []
    filters += [hf.MinPLogitsWarper(settings["min_p"])]
    text, scores = torch.tensor(ids[None, : prompt + count]), torch.tensor(logits[None], dtype=torch.float32)
    processed = hf.LogitsProcessorList(processors)(text, scores.clone())
    probabilities = torch.softmax(hf.LogitsProcessorList(filters)(text, processed.clone()), dim=-1)
    values = settings | {"ids": ids, "prompt": prompt, "count": count, "logits": scores[0].numpy()}
    values |= {"bias_ids": [*bias], "bias": [*bias.values()], "processed": processed[0].numpy()}
    for name, value in (values | {"probabilities": probabilities[0].numpy()}).items():
        saved.setdefault(name, []).append(value)
np.savez_compressed("transformers.npz", stops=STOPS, **{name: np.array(values) for name, values in saved.items()})
