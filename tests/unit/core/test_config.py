from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import Field, ValidationError

from lehr.core.config import Config, load, resolve
from lehr.core.errors import ConfigError


class Inner(Config):
    learning_rate: float = Field(1e-3, gt=0)
    names: tuple[str, ...] = ()


class Left(Config):
    type: Literal["left"] = "left"
    width: int = 1


class Right(Config):
    type: Literal["right"] = "right"
    height: int = 2


class Outer(Config):
    seed: int = 0
    inner: Inner = Inner()
    stages: tuple[Annotated[Left | Right, Field(discriminator="type")], ...] = ()


class Needy(Config):
    stages: tuple[Annotated[Left | Right, Field(discriminator="type")], ...] = Field(min_length=1)


def test_an_unknown_key_names_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'inner\.learning_rat'; did you mean 'learning_rate'\?"):
        resolve(Outer, {"inner": {"learning_rat": 1}})
    with pytest.raises(ConfigError, match="did you mean 'height'"):
        resolve(Outer, {"stages": [{"type": "right", "heigth": 1}]})


def test_an_unknown_key_that_is_near_nothing_lists_the_known_ones_of_its_level() -> None:
    with pytest.raises(ConfigError, match=r"known keys: inner, seed, stages\.$"):
        resolve(Outer, {"zzz": 1})
    with pytest.raises(ConfigError, match=r"known keys: height, type\.$"):
        resolve(Outer, {"stages": [{"type": "right", "zzz": 1}]})


def test_a_key_at_the_wrong_level_is_told_where_it_belongs() -> None:
    with pytest.raises(ConfigError, match=r"'inner\.learning_rate' exists; known keys: inner, seed, stages"):
        resolve(Outer, {"learning_rate": 1})


def test_every_problem_is_told_with_its_value() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(Outer, {"seed": "many", "inner": {"learning_rate": -1}}, where="recipe.toml")
    text = str(caught.value)
    assert text.startswith("recipe.toml: ")
    assert "seed: " in text
    assert "(got 'many')" in text
    assert "inner.learning_rate" in text
    assert "greater than 0 (got -1)" in text


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("seed=7", ("seed",), 7),
        ("inner.learning_rate=2e-5", ("inner", "learning_rate"), 2e-5),
        ('inner.names=["a", "b"]', ("inner", "names"), ("a", "b")),
        ("stages.1.height=9", ("stages", "1", "height"), 9),
        ("stages.0.type=right", ("stages", "0", "type"), "right"),
    ],
)
def test_overrides_reach_any_depth(override: str, path: tuple[str, ...], value: object) -> None:
    raw = {"stages": [{"type": "left"}, {"type": "right"}]}
    found: object = resolve(Outer, raw, [override])
    for key in path:
        found = found[int(key)] if key.isdigit() else getattr(found, key)  # type: ignore[index]
    assert found == value
    assert raw == {"stages": [{"type": "left"}, {"type": "right"}]}, "the given tree is not changed"


def test_text_overrides_need_no_quotes() -> None:
    assert resolve(Outer, {"inner": {"names": ["x"]}}, ["inner.names.0=code/functions"]).inner.names == (
        "code/functions",
    )


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("seed", "key=value"),
        ("=3", "key=value"),
        ("stages.5.width=1", "not an index below 1"),
        ("stages.x.width=1", "not an index"),
        ("stages.7=1", "not an index"),
        ("seed.deep=1", "is a value, not a table"),
        ("sead=1", "did you mean 'seed'"),
    ],
)
def test_a_wrong_override_says_what_is_wrong(override: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve(Outer, {"seed": 1, "stages": [{"type": "left"}]}, [override])


def test_a_config_is_frozen() -> None:
    with pytest.raises(ValidationError):
        Outer().seed = 3  # type: ignore[misc]


def test_the_digest_follows_the_resolved_values() -> None:
    assert Outer().digest() == Outer(seed=0, inner=Inner(learning_rate=0.001)).digest()
    digests = {
        Outer().digest(),
        Outer(seed=1).digest(),
        Outer(inner=Inner(learning_rate=2.0)).digest(),
        Outer(inner=Inner(names=("a", "b"))).digest(),
        Outer(inner=Inner(names=("b", "a"))).digest(),
    }
    assert len(digests) == 5
    assert all(len(d) == 16 and int(d, 16) >= 0 for d in digests)
    assert resolve(Outer, Outer(seed=4).model_dump(mode="json")).digest() == Outer(seed=4).digest()


def test_a_file_is_read_with_overrides(tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_text('seed = 3\n[inner]\nlearning_rate = 0.5\n[[stages]]\ntype = "right"\n')
    config = load(Outer, path, ["seed=4"])
    assert (config.seed, config.inner.learning_rate, config.stages) == (4, 0.5, (Right(),))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no such file: .*none\.toml"):
        load(Outer, tmp_path / "none.toml")
    for content in (b"seed = = 3", b"\xff\xfe"):
        path = tmp_path / "bad.toml"
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=r"cannot read .*bad\.toml"):
            load(Outer, path)


def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_bytes(b"\xef\xbb\xbfseed = 3\n")
    assert load(Outer, path).seed == 3


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*: Is a directory"):
        load(Outer, tmp_path)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("seed=true", r"seed: .*\(got True\)"),
        ('seed="3"', r"seed: .*\(got '3'\)"),
        ("seed=2.0", r"seed: .*\(got 2.0\)"),
        ("inner.learning_rate=inf", r"inner\.learning_rate: .*finite.*\(got inf\)"),
        ("inner.learning_rate=nan", r"inner\.learning_rate: .*finite.*\(got nan\)"),
        ("inner.learning_rate=true", r"inner\.learning_rate: .*\(got True\)"),
    ],
)
def test_a_number_is_a_finite_number_of_its_kind(override: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve(Outer, {}, [override])
    assert resolve(Outer, {}, ["inner.learning_rate=1"]).inner.learning_rate == 1.0


def test_tables_without_end_are_said(tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_text("v = " + "[" * 100_000)
    with pytest.raises(ConfigError, match=r"cannot read .*r\.toml"):
        load(Outer, path)


def test_a_wrong_entry_of_a_list_is_the_only_problem_told_and_has_the_key_to_type() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(Needy, {"stages": [{"type": "left", "width": "wide"}]})
    assert caught.value.what == "config: stages.0.width: Input should be a valid integer (got 'wide')"
    with pytest.raises(ConfigError, match=r"stages: .*at least 1"):
        resolve(Needy, {"stages": []})
