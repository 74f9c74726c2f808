"""Runs networks: rollouts, gradients, cross-gradient tables, knot search, learning signal, reward curves."""
