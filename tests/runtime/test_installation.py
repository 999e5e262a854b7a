from dataclasses import replace

import pytest

from midstream.runtime.installation import Installation, describe, find_installation

GPU = Installation(
    python="3.12.1",
    packages={
        "midstream": "0.1.0",
        "torch": "2.11.0+cu130",
        "triton": "3.6.0",
        "numba": "0.68.1",
        "numpy": "2.4.6",
        "transformers": "5.17.0",
    },
    torch_cuda="13.0",
    device_name="EXAMPLE",
    interprets_triton=False,
    has_fla=True,
)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({}, "device        cuda: EXAMPLE, torch built for CUDA 13.0"),
        ({}, "kernels       Triton"),
        ({}, "transformers  5.17.0 (tested)"),
        ({}, "fla           installed"),
        (
            {"device_name": None},
            "device        cpu: torch is built for CUDA 13.0 but finds no GPU or no driver",
        ),
        (
            {"device_name": None, "torch_cuda": None},
            "device        cpu: this build of torch has no CUDA",
        ),
        (
            {"device_name": None},
            "kernels       the references in plain torch: Triton kernels need a GPU",
        ),
        (
            {"interprets_triton": True},
            "kernels       Triton's interpreter (TRITON_INTERPRET=1 is set): very slow, unset it",
        ),
        (
            {"packages": GPU.packages | {"transformers": "5.20.0"}},
            "transformers  5.20.0 (tested: 5.17.0 and 5.24.0)",
        ),
        (
            {"packages": GPU.packages | {"transformers": None}},
            "transformers  not installed: pip install 'midstream[hf]'",
        ),
        ({"has_fla": False}, "fla           not installed (optional)"),
    ],
)
def test_a_missing_part_is_named_with_its_reason(change, line):
    assert line in describe(replace(GPU, **change))


def test_this_machine_is_found():
    found = find_installation()
    assert found.packages["torch"] is not None
    assert len({line.split()[0] for line in describe(found)}) == len(describe(found))
