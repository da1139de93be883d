"""A call's way through the library. `model.py` and `loading.py` are its front; behind them are four rooms.

`settings/` says what a call wants, `call/` what it is, `schedule/` when and where each answer is decoded, `answers/` what
comes back. A room imports from those before it. The compiled rounds are below, in `decoding/`.
"""
