"""Scheduling of requests in the slots of a batch.

Scheduling never changes an answer: each equals the answer to its prompt alone. `slots` owns slot numbers, `admission`
chooses the next requests, `batching` pads requests to arrays, `runner` has the programs, `prefill` reads prompts,
`prefixes` and `session` find caches that hold the beginning of a prompt, `scheduler` runs the rounds.
"""
