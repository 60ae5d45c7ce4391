"""The subset of JSON Schema."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.json_schema import schema_errors

CASES = [
    ({"type": "integer"}, [1, 1.0, -3], [1.5, "1", True, None]),
    ({"type": "number"}, [1, 1.5], [True, "1"]),
    ({"type": ["string", "null"]}, ["", None], [0, []]),
    ({"type": "boolean"}, [True], [1, 0]),
    ({"enum": [1, "a", None]}, [1, 1.0, "a", None], [True, "b"]),
    ({"const": {"a": [1]}}, [{"a": [1]}, {"a": [1.0]}], [{"a": [True]}, {}]),
    ({"minimum": 1, "exclusiveMaximum": 3}, [1, 2.9, "x"], [0, 3]),
    ({"multipleOf": 0.5}, [1.5, 2], [1.2]),
    ({"minLength": 1, "maxLength": 2, "pattern": "^a"}, ["a", "ab", 3], ["", "abc", "b"]),
    ({"minItems": 1, "maxItems": 2, "uniqueItems": True}, [[1], [1, 2]], [[], [1, 1], [1, 2, 3]]),
    ({"items": {"type": "string"}}, [[], ["a"]], [[1], ["a", 1]]),
    (
        {"properties": {"a": {"type": "integer"}}, "required": ["a"]},
        [{"a": 1}, {"a": 1, "b": 2}, 3],
        [{}, {"a": "x"}],
    ),
    ({"properties": {"a": {}}, "additionalProperties": False}, [{"a": 1}, {}], [{"b": 1}]),
    ({"additionalProperties": {"type": "string"}}, [{"b": "x"}], [{"b": 1}]),
    ({"anyOf": [{"type": "string"}, {"minimum": 5}]}, ["x", 7], [3]),
    ({"oneOf": [{"minimum": 5}, {"maximum": 7}]}, [3, 9], [6]),
    ({"allOf": [{"minimum": 5}, {"maximum": 7}]}, [6], [4, 8]),
    ({"not": {"type": "null"}}, [0], [None]),
    ({"title": "t", "description": "d", "format": "email"}, [1, "x"], []),
    (True, [1], []),
    (False, [], [1]),
]


@pytest.mark.parametrize(("schema", "good", "bad"), CASES)
def test_values_are_allowed_or_not(schema, good: list, bad: list):
    assert [value for value in good if schema_errors(value, schema)] == []
    assert [value for value in bad if not schema_errors(value, schema)] == []


def test_the_place_of_a_mistake_is_told():
    schema = {"properties": {"a": {"items": {"type": "string"}}}}
    assert schema_errors({"a": ["x", 3]}, schema) == ["$.a[1]: not of type string"]


@pytest.mark.parametrize("schema", [{"typo": 1}, {"type": "text"}, {"items": {"$ref": "#"}}])
def test_what_is_not_known_is_refused_rather_than_ignored(schema: dict):
    with pytest.raises(ValueError):
        schema_errors([1], schema)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)


@given(json_values)
def test_every_value_is_its_own_constant_and_no_other_type(value):
    assert schema_errors(value, {"const": value}) == []
    assert schema_errors([value], {"const": value})
