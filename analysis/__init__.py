"""What the approximations cost, explained by measurement: run from the checkout with ``python -m analysis``."""
