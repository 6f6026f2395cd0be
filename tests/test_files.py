"""Files are written whole or not at all."""

import pytest

from keras_tinygpt.files import replace_file, write_csv, write_json


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"value": 1})

    def fail(temporary):
        temporary.write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        replace_file(path, fail)
    assert path.read_text() == '{\n  "value": 1\n}\n'
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(path, {"value": float("nan")})
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_csv(tmp_path):
    path = tmp_path / "a.csv"
    write_csv(path, [{"step": 1, "loss": 2.5}, {"step": 2, "loss": 2.0}])
    assert path.read_text().splitlines() == ["step,loss", "1,2.5", "2,2.0"]
