"""Computes numbers from numbers: intervals, learning signal, `jagg_frac`, kinds of parameters."""
