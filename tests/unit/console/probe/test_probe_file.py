import json

import pytest

from console.probe.probe_file import Probe, probe_json, read_inventory
from penstock.config import ConfigError
from tests.helpers.plans.probes import document, link, write


def test_what_is_written_is_read_back(tmp_path):
    linked = document("gpu-2", links=[{**link("gpu-9", "there"), "round_trip_ms": 2e-05}])
    folder = write(tmp_path / "inventory", linked, document("gpu-1"))
    found = read_inventory(folder)
    assert [path.name for path in found] == ["gpu-1.json", "gpu-2.json"]
    assert found[folder / "gpu-2.json"] == Probe.model_validate(linked)
    assert json.loads(probe_json(found[folder / "gpu-2.json"])).items() >= linked.items()


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "holds no probe; run penstock probe --out"),
        ({"a.json": document(schema="penstock-probe/2")}, "schema: 'penstock-probe/2' is not penstock-probe/1"),
        ({"a.json": document(matrix_tflops_bf16=-1)}, "matrix_tflops_bf16"),
        ({"a.json": document(name="../a")}, "name"),
        ({"a.json": document(), "b.json": document()}, "name: 'gpu-1' is also the name in"),
    ],
)
def test_a_folder_that_cannot_be_used_is_refused_in_a_line(tmp_path, files, said):
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(ConfigError) as refused:
        read_inventory(tmp_path)
    assert said in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1
