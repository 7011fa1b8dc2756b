import pytest

from service.settings import SettingsFault, load
from service.signals.connect import check_url


def test_an_empty_environment_is_valid() -> None:
    settings = load({"PATH": "/bin"})
    assert (settings.host, settings.port, settings.redis_url) == ("127.0.0.1", 8000, None)


def test_all_faults_are_listed_together() -> None:
    with pytest.raises(SettingsFault) as fault:
        load(
            {
                "RANKER_PORT": "many",
                "RANKER_SPEED": "11",
                "RANKER_MAX_ITEMS": "0",
                "RANKER_REDIS_URL": "http://h",
            },
            checks={"redis_url": check_url},
        )
    lines = str(fault.value).splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        "RANKER_MAX_ITEMS",
        "RANKER_PORT",
        "RANKER_REDIS_URL",
        "RANKER_SPEED",
    ]
    assert "unknown scheme" in lines[2]
    assert lines[3].endswith("no such setting")


def test_a_short_secret_is_told_without_telling_it() -> None:
    with pytest.raises(SettingsFault) as fault:
        load({"RANKER_ADMIN_TOKEN": "hunter2"})
    assert str(fault.value) == "RANKER_ADMIN_TOKEN: at least 16 characters are needed"


def test_a_wrong_name_is_told_with_the_pattern_that_it_must_fit() -> None:
    with pytest.raises(SettingsFault, match=r"RANKER_REPLICA: .*pattern.*\{0,199\}"):
        load({"RANKER_REPLICA": "b d"})


def test_secrets_are_masked() -> None:
    settings = load({"RANKER_REDIS_URL": "redis://:hunter2@h/0", "RANKER_API_KEYS": "k1, k2"})
    assert "hunter2" not in repr(settings)
    assert "k1" not in repr(settings)
    assert [key.get_secret_value() for key in settings.api_keys] == ["k1", "k2"]
