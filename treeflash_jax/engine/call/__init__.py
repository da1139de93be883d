"""A call: prompts in any form, read as token ids, and one request for every answer.

Add a form of prompts in `prompts`, and a property in which answers of one call differ in `requests`.
"""
