"""A call: prompts in any form, read as token ids, and one request for every answer.

A form of prompts is added in `prompts`, what distinguishes one answer from another in `requests`. Imported by whatever
makes a call, and by the schedule.
"""
