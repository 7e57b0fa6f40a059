import pytest

from cluster.config import Config, load_config, parse_set, parse_size
from cluster.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "size"), [("512MiB", 512 * 2**20), ("4GiB", 4 * 2**30), ("10", 10), ("2 KiB", 2048)]
)
def test_sizes_with_units_are_bytes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1.5GiB", "5MB", "1e3"])
def test_a_size_that_is_none_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(ConfigError, match="512MiB"):
        parse_size(text)


def test_defaults_need_no_file() -> None:
    assert load_config(None, {}) == Config()


def test_flags_win_over_the_file_and_other_keys_of_the_section_stay(tmp_path) -> None:
    file = tmp_path / "cell.toml"
    file.write_text("[http]\nport = 9000\nhost = '0.0.0.0'\n")
    config = load_config(file, {"http.port": 9001})
    assert (config.http.port, config.http.host) == (9001, "0.0.0.0")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"http.prot": 1}, "prot"),
        ({"htpp.port": 1}, "htpp"),
        ({"http.port": "x"}, "http.port"),
        ({"http.port": 70000}, "http.port = 70000 is out of range: 0 to 65535"),
        ({"cell.ep_size": -1}, "cell.ep_size = -1"),
        ({"scheduler.max_num_batched_tokens": 0}, "max_num_batched_tokens = 0"),
        ({"store.kv_memory": "lots"}, "lots"),
        ({"cell.dispatch": "fixed"}, "dispatch"),
    ],
)
def test_a_key_or_value_that_is_not_known_is_refused_by_name(overrides, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(None, overrides)


def test_a_missing_or_broken_file_is_one_error_that_names_it(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.toml"):
        load_config(tmp_path / "missing.toml", {})
    broken = tmp_path / "broken.toml"
    broken.write_text("= 3")
    with pytest.raises(ConfigError, match=r"broken.toml.*TOML"):
        load_config(broken, {})


def test_set_reads_toml_values_and_takes_the_rest_as_text() -> None:
    assert parse_set("store.block_size=32") == ("store.block_size", 32)
    assert parse_set("store.route_replay=false") == ("store.route_replay", False)
    assert parse_set("store.kv_memory=1GiB") == ("store.kv_memory", "1GiB")
    for bad in ("store.block_size", "block_size=3", "a.b.c=3"):
        with pytest.raises(ConfigError, match=r"section\.key=value"):
            parse_set(bad)
