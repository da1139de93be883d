"""Draft trees whose number of nodes is chosen in every round: nodes="auto", and the calibration it needs."""
