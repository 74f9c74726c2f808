"""Settings for the tests of the integrations."""

from tests.jagg_core.conftest import one_thread

__all__ = ["one_thread"]
