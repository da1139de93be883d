"""A call's way through the library. `model.py` and `loading.py` are the front; behind them are four rooms.

`settings/` says what a call wants, `call/` what it is, `schedule/` when and where each answer is decoded, `answers/` what comes
back. A room imports from those before it; the compiled rounds are below, in `decoding/`.
"""
