"""Scheduling: which request decodes in which slot of a batch, and when.

Nothing here changes an answer: the answers of any schedule are those of each prompt alone. `slots` owns slot numbers,
`admission` decides who is next, `batching` pads requests to arrays, `prefill` has the programs and reads prompts,
`prefixes` and `session` find caches that a prompt goes on from, `scheduler` runs the rounds. Imported by the model, its
results, the server and benchmarks.
"""
