"""What a call wants: its settings, the models that it names, defaults, and the plan of the programs that follow from them.

A setting is declared in `generate_config` (`tests/write_keywords.py` then writes `keywords`), a default that depends on the
device in `defaults`; only `plan.resolve` reads both. Imported by every other room, the commands, the server and training.
"""
