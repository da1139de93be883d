"""A server with OpenAI's API: requests come in over HTTP at any time, one thread decodes all of them together.

Needs the packages of the extra `serve`; only the command `treeflash serve` imports it.
"""
