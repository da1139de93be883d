"""Draft trees that are chosen in every round: how many nodes (nodes="auto"), or which delayed tree (a selector).

Built on `decoding`, which does not know of it: the states wrap the DecodeState, the rounds are made of the stages of
`decoding.rounds`, and `runner.AdaptiveRunner` and `selecting.SelectingRunner` have the methods of `decoding.runner.Runner`.

The number of nodes goes by a calibration: state, budget, rounds, loops, runner. A selector is a trained network: selector,
selecting.
"""
