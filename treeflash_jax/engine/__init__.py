"""Calls of a model. `loading` and `model` are the entry points, and `prepared_call` decodes a call.

Four folders do the work. `settings/`: settings, their defaults, and the plan of the programs. `call/`: prompts and
requests. `schedule/`: slots, and the reading of prompts. `answers/`: results, texts and drawn trees. Each folder imports
from the folders before it. `device_memory.py` counts the bytes that a model needs. The compiled rounds are not here, but
in `decoding/`.
"""
