"""Rules for sampled trees, which test the draws of a `trees.Proposal`.

A rule is a subclass of `draws.DrawsRule`, or of `draws.TopDownRule` if it goes from the root to an accepted child, level by
level. At each node, it reads the verifier's probabilities of the tokens that may be drafted there (the support), and the
sum of all others. Only the last accepted node needs a vector over the whole vocabulary, for the bonus token.
"""
