"""Draft trees whose number of nodes is chosen in every round: nodes="auto", and the calibration it needs.

Built on `decoding`, which does not know of it: the state wraps the DecodeState, the rounds are made of the stages of
`decoding.rounds`, and `runner.AdaptiveRunner` has the methods of `decoding.runner.Runner`.
"""
