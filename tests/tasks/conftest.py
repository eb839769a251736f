import pytest

from tests.tasks.support import pretrained, write_rows


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """family → its folder, made when it is asked for."""
    made = {}

    def get(family):
        if family not in made:
            made[family] = pretrained(family, tmp_path_factory.mktemp(family))
        return str(made[family])

    return get


@pytest.fixture(scope="session")
def rows(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("rows"))
