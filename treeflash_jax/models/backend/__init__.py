"""Functions with special forms for some backends, each beside its plain form.

`lax.platform_dependent` chooses the form when a program is lowered, so programs for another device can be compiled ahead of
time. Tests run all forms of these functions on the CPU. Kernels, which a call chooses, are in `models.kernels`.
"""
