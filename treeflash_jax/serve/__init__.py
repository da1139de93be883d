"""A server with OpenAI's and Anthropic's APIs: requests come over HTTP at any time, one thread decodes all of them.

Needs the packages of the extra `serve`; only the command `treeflash serve` imports it.
"""
