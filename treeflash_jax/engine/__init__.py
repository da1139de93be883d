"""A call's way through the library. `model`, `prepared_call` and `loading` are its front; behind them are four rooms.

`settings/`: settings, their defaults, and the plan of the programs. `call/`: prompts and requests. `schedule/`: slots, and
the reading of prompts. `answers/`: results, texts and drawn trees. A room imports from those before it. `device_memory.py`
says what a model needs; the compiled rounds are below, in `decoding/`.
"""
