"""Settings of a call, the names of models, defaults, and the plan of the programs that follow from them.

A setting is declared in `generate_config`, or for `tf.load` in `model_options` (`tests/write_keywords.py` then writes
`keywords`); a default that depends on the device in `defaults`. `plan.resolve` combines them. A setting of sampling with a
`dtype` is also a field of a server's bodies and an array of `decoding.state.Sampling`; its arithmetic is in
`decoding.processors`. Imported by whatever loads a model or makes a call: the other rooms, the commands, the server,
benchmarks and training.
"""
