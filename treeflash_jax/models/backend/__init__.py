"""Everything that asks which backend runs: functions with special forms for some backends, each beside its plain form.

`lax.platform_dependent` picks the form when a program is lowered, so that programs for another device can be compiled ahead
of time. Tests run each of these functions in both forms on the CPU. Kernels, which a call chooses: `models.kernels`.
"""
