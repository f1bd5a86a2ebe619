import pytest
from pydantic import Field

from penstock.config import ConfigError, StrictModel, apply_overrides, read_document, validate


class Inner(StrictModel):
    learning_rate: float = Field(default=0.1, gt=0)


class Outer(StrictModel):
    inner: Inner = Inner()
    name: str


def errors_of(document):
    with pytest.raises(ConfigError) as caught:
        validate(Outer, document, source="run.yaml")
    return str(caught.value).splitlines()


def test_an_unknown_key_is_refused_with_the_nearest_known_name():
    assert errors_of({"name": "x", "inner": {"learning_rat": 1}}) == [
        "run.yaml: inner.learning_rat: unknown key; did you mean 'learning_rate'?"
    ]


def test_every_problem_gets_one_line_with_key_and_value():
    lines = errors_of({"inner": {"learning_rate": -1}})

    assert lines == [
        "run.yaml: inner.learning_rate: Input should be greater than 0 (got -1)",
        "run.yaml: name: required, but not given",
    ]


def test_a_wrong_type_names_what_was_given():
    assert "(got 'fast')" in errors_of({"name": "x", "inner": {"learning_rate": "fast"}})[0]


def test_overrides_are_yaml_and_leave_the_document_alone():
    document = {"inner": {"learning_rate": 1.0}}

    changed = apply_overrides(document, ["inner.learning_rate=2e-3", "name=x", "a.b.c=[1, 2]"])

    assert changed == {"inner": {"learning_rate": "2e-3"}, "name": "x", "a": {"b": {"c": [1, 2]}}}
    assert validate(Outer, {k: changed[k] for k in ("inner", "name")}, source="s").inner.learning_rate == 0.002
    assert document == {"inner": {"learning_rate": 1.0}}


@pytest.mark.parametrize("override", ["nothing", "=1", "a..b=1", "a=[1", "inner.learning_rate.x=1"])
def test_a_malformed_override_is_refused(override):
    with pytest.raises(ConfigError, match="override"):
        apply_overrides({"inner": {"learning_rate": 1.0}}, [override])


@pytest.mark.parametrize(
    ("text", "message"), [("a: [1", "not valid YAML"), ("- 1", "must hold keys"), (None, "no such")]
)
def test_a_broken_file_is_named(tmp_path, text, message):
    path = tmp_path / "run.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        read_document(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)
