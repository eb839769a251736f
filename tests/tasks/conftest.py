import pytest

from tests.tasks.support import pretrained, write_rows


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Return a function from a family to the folder of its model, which is created on first use."""
    made = {}

    def get(family):
        if family not in made:
            made[family] = pretrained(family, tmp_path_factory.mktemp(family))
        return str(made[family])

    return get


@pytest.fixture(scope="session")
def rows(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("rows"))
