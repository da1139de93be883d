"""A server with OpenAI's and Anthropic's APIs. Requests come over HTTP at any time, and one thread decodes all of them.

It needs the packages of the extra `serve`. Only `treeflash serve` imports more of it than `options`, which needs no extra.
"""
