"""Scheduling of requests in the slots of a batch.

Scheduling changes no answer: each equals the answer to its prompt alone (with sampled trees of n-grams, in distribution).
`slots` owns slot numbers, `admission` chooses the next requests, `batching` pads requests to arrays, `runner` has the
programs, `prefill` reads prompts, `prefixes` and `session` find caches that hold the beginning of a prompt, `scheduler`
runs rounds; `call_scheduler` reads the prompts of a call, `open_scheduler` those of a server.
"""
