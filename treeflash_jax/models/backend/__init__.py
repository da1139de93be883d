"""Functions with special variants for some backends, each beside its plain variant.

`lax.platform_dependent` chooses the variant when a program is lowered, so programs for another device can be compiled ahead
of time. Tests run all variants of these functions on the CPU. Kernels, which a call chooses, are in `models.kernels`.

- Variants for CPUs run daily: in `products`, `rotation`, `indexing`, `selection`, `levels` and `expert_sums`.
- Variants for TPUs never ran on one: programs for TPUs were only compiled (notebooks/results/tpu_estimates.md). `products`
  has them for one vector and for attention, `rotation` for several positions, `indexing` for stores; all files of experts
  and of weights with blocks have some.
- Variants for GPUs never ran on one, either: in `group_products`, and in `block_products` for one vector, where CPUs and
  TPUs multiply two. For everything else, GPUs run the plain variants.
"""
