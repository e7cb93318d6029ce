"""eval.quantised holds the embedded model in int8 against itself in float32."""

import json

from eval import quantised


def test_int8_keeps_what_float32_has_right(capsys):
    assert quantised.main(["--scenes", "24", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {*quantised.WAYS, "failures", "environment"}
    assert found["float32"] | {"logits": 0.0} == found["float32"] and found["float32"]["kept"] == 1
    assert 0 < found["float32, int8"]["logits"] < 0.1
