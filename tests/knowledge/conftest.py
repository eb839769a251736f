from tests.tasks.conftest import models, rows  # noqa: F401 - fixtures
