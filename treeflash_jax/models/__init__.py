"""Language models: layers, caches, weights in 8 and 4 bits, vocabulary, and the forward pass of a decoder.

Verifiers and drafters share them. A kind of layer is a `layer_protocol.LayerKind` with a line in `layer_kinds.KINDS`.
Functions with variants for some backends are in `backend`, kernels in `kernels`.
"""
