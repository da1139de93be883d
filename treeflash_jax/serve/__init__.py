"""A server with OpenAI's and Anthropic's APIs. Requests come over HTTP at any time, and one thread decodes all of them.

The way of a request; each reader is named after what it returns:

1. `limits` checks its size, `app` its path and key. `http_answers` has it read and decoded, until it is answered.
2. `call_reader` parses the body, and adapts the call to the model. A protocol's `Exchange` reads the call (`server_call`).
3. `request_maker` encodes its prompts, and makes a request of the scheduler for each answer.
4. `worker` decodes them, and sends back pieces of the answers.
5. `delta_reader` turns pieces into deltas; the `Exchange` writes them as the response, or as events of a stream.

It needs the packages of the extra `serve`. Only `treeflash serve` imports more of it than `options`, which needs no extra.
"""
