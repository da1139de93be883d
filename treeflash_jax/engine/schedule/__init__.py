"""Scheduling of requests in the slots of a batch.

No schedule changes an answer: each is the answer to its prompt alone. `slots` owns slot numbers, `admission` chooses the
next requests, `batching` pads requests to arrays, `optional_automata` leaves automata out while no answer has a constraint,
`runner` has the programs, `prefill` reads prompts, `prefixes` and `session` find caches with which a prompt begins,
`scheduler` runs the rounds. Imported by the model, its results, the server and benchmarks.
"""
