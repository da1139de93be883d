"""Scheduling: which request decodes in which slot of a batch, and when. Imported by the model, its results and the server.

Nothing here changes an answer: the answers of any schedule are those of each prompt alone. `slots` owns slot numbers,
`admission` decides who is next, `prefill` reads prompts, `prefixes` and `session` find caches that a prompt goes on from,
`scheduler` runs the programs.
"""
