"""Names of GPUs."""

import pytest

from linnaeus.autobatch.predict.gpus import BASE_MIB, GPUS, find_gpu


def test_names():
    said_by_drivers = {
        "NVIDIA GeForce RTX 4090": "rtx-4090",
        "Tesla T4": "t4",
        "A100_80GB": "a100-80gb",
        "NVIDIA RTX 6000 Ada Generation": "rtx-6000-ada",
        "h100": "h100-80gb",
        "2080ti": "rtx-2080-ti",
    }
    for typed, name in {**{name: name for name in GPUS}, **said_by_drivers}.items():
        found = find_gpu(typed)
        assert (found.name, found.total_bytes) == (name, GPUS[name])
        middle, least, most = found.base_mib
        assert 50 < least <= middle <= most < 2048
    assert {find_gpu(name).base_mib for name in GPUS} == {*BASE_MIB.values()}
    assert find_gpu("a10").base_mib == find_gpu("3090").base_mib != find_gpu("a30").base_mib
    for several in ("a100", "3080", "NVIDIA A100"):
        with pytest.raises(ValueError, match=r".*-[0-9]+gb or .*-[0-9]+gb"):
            find_gpu(several)
    for unknown in ("", "rtx", "a1000"):
        with pytest.raises(KeyError):
            find_gpu(unknown)
