"""A JSON schema, and whether an answer follows it."""

SCHEMA = {
    "type": "object",
    "properties": {"color": {"enum": ["green", "blue"]}, "n": {"type": "integer", "minimum": 0, "maximum": 9},
                   "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2}},
    "required": ["color", "n", "tags"],
    "additionalProperties": False,
}  # fmt: skip


def assert_fits(value):
    assert list(value) == ["color", "n", "tags"] and value["color"] in ("green", "blue") and value["n"] in range(10)
    assert len(value["tags"]) <= 2 and set(value["tags"]) <= {"a", "b"}
