"""Settings of a call, the names of models, defaults, and the plan of the programs that follow from them.

Settings of a call are declared in `generate_config`, those of `tf.load` in `model_options`. `tests/write_keywords.py` then
writes `keywords`. Defaults that depend on the device are in `defaults`. `plan.resolve` combines settings and defaults.
A sampling setting with a `dtype` also becomes a field of the server's requests and an array of `decoding.state.Sampling`;
its arithmetic is in `decoding.processors`.
"""
