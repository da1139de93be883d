"""What a call is: prompts in any form, read as token ids, and one request for every answer. Imported by the rooms after it.

A form of prompts is added in `prompts`, what distinguishes one answer from another in `requests`.
"""
